"""What is launched at the start, so that no request waits for a compiler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_fakes import FakeDevice, fixed_attention, make_model

from trellis.runtime.attention.tiles import Split, by_height, cut
from trellis.runtime.cuda.step import DeviceStep
from trellis.runtime.cuda.tokens import TokenTable
from trellis.runtime.cuda.warm_up import every_kind_of_extend, warm_up
from trellis.runtime.executor.batch import flatten
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.kernels.tile_shapes import tile_shapes


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_of_every_height_and_pieces_of_each_are_among_it(group, head_dim):
    shapes = tile_shapes(head_dim, torch.bfloat16, (9, 0))
    batch = flatten(every_kind_of_extend())
    found = by_height(batch.lengths, group, [shape.height for shape in shapes])
    assert [index for index, _ in found] == list(range(len(shapes)))
    for index, extends in found:
        split = Split(budget=132 * 4 // 8, least=128, block=shapes[index].keys)
        work = cut(batch, extends, group, shapes[index].height, None, split)
        assert len(work.merges) > 0, f"height {shapes[index].height}"


def test_it_writes_to_the_sink_alone_and_waits_for_nothing():
    model, device = make_model(), FakeDevice()
    pool = KVPool(model.config, 20, torch.float32)
    for stored in (*pool.keys, *pool.values):
        stored.normal_(generator=torch.Generator().manual_seed(0))
    before = [stored.clone() for stored in (*pool.keys, *pool.values)]
    attention = fixed_attention(model.config, pool)
    with torch.inference_mode():
        warm_up(DeviceStep(model, attention, device, TokenTable(4, device.where)), device)
    for old, new in zip(before, (*pool.keys, *pool.values), strict=True):
        assert torch.equal(old[1:], new[1:])
        assert not torch.equal(old[0], new[0])
    assert "wait" not in device.log


def test_all_tokens_stand_in_the_sink():
    assert all(not np.any(extend.slots) for extend in every_kind_of_extend())
