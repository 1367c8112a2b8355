"""The attention backends of a CPU against attention written out token by token in float64."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from trellis.errors import ModelLoadError
from trellis.runtime.attention import AttentionShape, create_attention
from trellis.runtime.attention.torch_reference import LENGTH_STEP, TorchAttention, similar_lengths
from trellis.runtime.executor.batch import Batch, Extent, pack
from trellis.runtime.executor.contract import Extend
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.models import ModelConfig

SLOTS = 400


def config(heads: int, kv_heads: int, windows: tuple[int | None, ...]) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_layers=len(windows),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=8,
        context_length=256,
        norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        tied_head=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=windows,
    )


def naive(
    shape: AttentionShape, pool: KVPool, batch: Batch, q: torch.Tensor, layer: int, window: int | None
) -> torch.Tensor:
    """One query, one head at a time, from a pool that holds all keys and values."""
    out = torch.empty_like(q, dtype=torch.float64)
    share = shape.num_heads // shape.num_kv_heads
    for extent, i in ((e, i) for e in batch.extents for i in range(e.length)):
        position = extent.start + i
        first = 0 if window is None else max(0, position - window + 1)
        slots = extent.slots[first : position + 1]
        for head in range(shape.num_heads):
            k = pool.keys[layer][slots, head // share].double()
            v = pool.values[layer][slots, head // share].double()
            scores = k @ q[extent.offset + i, head].double() * shape.scale
            if shape.soft_cap is not None:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            out[extent.offset + i, head] = scores.softmax(0) @ v
    return out


def random_batch(random: np.random.Generator, lengths: list[int], starts: list[int]) -> Batch:
    totals = [n + s for n, s in zip(lengths, starts, strict=True)]
    slots = np.split(
        random.permutation(np.arange(1, SLOTS + 1, dtype=np.int32))[: sum(totals)], np.cumsum(totals)
    )
    extends = [
        Extend(np.zeros(n, np.int32), start, own, n)
        for n, start, own in zip(lengths, starts, slots, strict=False)
    ]
    return pack(extends, torch.device("cpu"))


def filled_pool(model: ModelConfig, generator: torch.Generator) -> KVPool:
    pool = KVPool(model, SLOTS, torch.float32)
    for tensor in (*pool.keys, *pool.values):
        tensor[1:] = torch.randn(tensor[1:].shape, generator=generator)
    return pool


BATCHES = {
    "prefill": ([17], [0]),
    "chunk": ([9], [23]),
    "one decode": ([1], [40]),
    "decodes of mixed lengths": ([1] * 6, [0, 3, 30, 150, 7, 31]),
    "all kinds": ([1, 12, 1, 3, 30], [60, 0, 2, 20, 5]),
}


@pytest.mark.parametrize("name", ["torch", "native"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("kind", BATCHES)
def test_equals_attention_written_out(name, heads, kv_heads, soft_cap, kind):
    windows = (None, 6)
    model = config(heads, kv_heads, windows)
    generator = torch.Generator().manual_seed(3)
    pool = filled_pool(model, generator)
    shape = AttentionShape(heads, kv_heads, 8, 0.4, windows, soft_cap)
    backend = create_attention(name, shape, pool)
    batch = random_batch(np.random.default_rng(5), *BATCHES[kind])
    backend.plan(batch)
    for layer, window in enumerate(windows):
        tokens = len(batch.token_ids)
        q = torch.randn(tokens, heads, 8, generator=generator)
        k, v = torch.randn(2, tokens, kv_heads, 8, generator=generator)
        got = backend.run(q, k, v, layer)
        assert torch.equal(pool.keys[layer][batch.write_slots], k)
        assert torch.equal(pool.values[layer][batch.write_slots], v)
        want = naive(shape, pool, batch, q, layer, window)
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("windows", [(None,), (4,)])
def test_padded_decodes_equal_one_at_a_time(windows):
    model = config(6, 3, windows)
    generator = torch.Generator().manual_seed(3)
    pool = filled_pool(model, generator)
    shape = AttentionShape.of(model)
    batch = random_batch(np.random.default_rng(5), [1] * 8, [0, 1, 2, 9, 33, 60, 70, 120])
    q = torch.randn(8, 6, 8, generator=generator)
    k, v = torch.randn(2, 8, 3, 8, generator=generator)
    results = []
    for backend in (TorchAttention(shape, pool), TorchAttention(shape, pool, batch_decodes=False)):
        backend.plan(batch)
        results.append(backend.run(q, k, v, 0))
    torch.testing.assert_close(*results, atol=1e-5, rtol=0)


def test_padding_sink_is_never_written_nor_seen():
    model = config(2, 2, (None,))
    pool = filled_pool(model, torch.Generator().manual_seed(3))
    backend = create_attention("torch", AttentionShape.of(model), pool)
    batch = random_batch(np.random.default_rng(5), [1, 1], [2, 50])
    q, k, v = torch.randn(3, 2, 2, 8, generator=torch.Generator().manual_seed(1))
    backend.plan(batch)
    clean = backend.run(q, k, v, 0)
    assert not pool.keys[0][0].any()
    assert not pool.values[0][0].any()
    pool.keys[0][0], pool.values[0][0] = 100.0, 100.0
    assert torch.equal(backend.run(q, k, v, 0), clean)


def test_similar_lengths_keep_padding_under_half():
    lengths = [1, 5, 64, 100, 127, 128, 129, 300, 600, 2000, 3999, 4000]
    extents = [Extent(i, 1, n - 1, torch.zeros(n, dtype=torch.int64)) for i, n in enumerate(lengths)]
    groups = similar_lengths(extents)
    assert sorted(e.offset for group in groups for e in group) == list(range(len(lengths)))
    for group, next_group in product(groups, groups):
        sizes = [len(e.slots) for e in group]
        assert max(sizes) < 2 * max(64, min(sizes))
        if group is not next_group:
            assert {e.offset for e in group}.isdisjoint(e.offset for e in next_group)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_growing_contexts_have_few_shapes(batch_size):
    """A product of a new shape is slow, and memory is kept for each."""
    pool = KVPool(config(2, 1, (None,)), SLOTS, torch.float32)
    attention = TorchAttention(AttentionShape.of(config(2, 1, (None,))), pool)
    rng = np.random.default_rng(0)
    shapes = []
    for length in range(100, 356):
        slots = rng.integers(1, SLOTS, length + 1).astype(np.int32)
        attention.plan(pack([Extend(np.array([1]), length, slots, 0)] * batch_size, torch.device("cpu")))
        shapes.append(len(attention._decodes[0].head_rows))
    assert len(set(shapes)) == 9
    assert all(
        0 <= rows - batch_size * (100 + i + 1) < batch_size * LENGTH_STEP for i, rows in enumerate(shapes)
    )


def test_unknown_backend_names_the_known_ones():
    model = config(2, 2, (None,))
    with pytest.raises(ModelLoadError, match=r"'flash9'.*auto, flashinfer, native, torch, triton"):
        create_attention("flash9", AttentionShape.of(model), KVPool(model, 4, torch.float32))


def test_default_scale_is_the_root_of_the_head_size():
    assert math.isclose(AttentionShape.of(config(2, 2, (None,))).scale, 8**-0.5)
