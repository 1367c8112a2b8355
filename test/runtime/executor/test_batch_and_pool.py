"""Extends become one packed batch; the pool holds a row a slot."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trellis.runtime.executor.batch import pack
from trellis.runtime.executor.contract import Extend
from trellis.runtime.executor.kv_pool import KVPool

CPU = torch.device("cpu")


def extend(tokens: list[int], start: int, slots: list[int], logits_from: int) -> Extend:
    return Extend(np.array(tokens, np.int32), start, np.array(slots, np.int32), logits_from)


def test_pack_lays_extends_one_after_the_other():
    batch = pack(
        [
            extend([5, 6, 7], 0, [11, 12, 13], 2),
            extend([8], 2, [21, 22, 23], 0),
            extend([9, 4], 1, [31, 32, 33], 2),
            extend([3, 2], 3, [41, 42, 43, 44, 45], 0),
        ],
        CPU,
    )
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 4, 3, 2]
    assert batch.positions.tolist() == [0, 1, 2, 2, 1, 2, 3, 4]
    assert batch.write_slots.tolist() == [11, 12, 13, 23, 32, 33, 44, 45]
    assert batch.logits_rows.tolist() == [2, 3, 6, 7]
    assert [(e.offset, e.length, e.start) for e in batch.extents] == [
        (0, 3, 0),
        (3, 1, 2),
        (4, 2, 1),
        (6, 2, 3),
    ]
    assert batch.extents[1].slots.tolist() == [21, 22, 23]


@pytest.mark.parametrize(
    "bad",
    [
        extend([], 2, [1, 2], 0),
        extend([5], 2, [1, 2], 0),
        extend([5], 0, [1], 2),
        extend([5], 0, [1], -1),
    ],
    ids=["no tokens", "a slot short", "logits past the end", "negative"],
)
def test_pack_refuses_what_contradicts_itself(bad):
    with pytest.raises(ValueError, match="extend 1"):
        pack([extend([5], 0, [1], 0), bad], CPU)


def test_pack_refuses_an_empty_batch():
    with pytest.raises(ValueError, match="at least one"):
        pack([], CPU)


@pytest.mark.parametrize(
    ("slots", "page", "usable", "rows"),
    [(40, 1, 40, 41), (40, 16, 32, 48), (48, 16, 48, 64), (15, 16, 0, 16)],
)
def test_a_pool_has_whole_pages_and_one_for_the_sink(slots, page, usable, rows):
    shape = SimpleNamespace(num_layers=2, num_kv_heads=3, head_dim=4)
    pool = KVPool(shape, slots, torch.float32, page_size=page)  # type: ignore[arg-type]
    assert (pool.slots, pool.page_size) == (usable, page)
    assert {tensor.shape for tensor in (*pool.keys, *pool.values)} == {(rows, 3, 4)}
