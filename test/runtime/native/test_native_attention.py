"""Native attention against the reference, over random ragged batches."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

from trellis.runtime.attention.base import AttentionShape
from trellis.runtime.attention.native import NativeAttention
from trellis.runtime.attention.torch_reference import TorchAttention
from trellis.runtime.executor.batch import Batch, pack
from trellis.runtime.executor.contract import Extend
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.models import ModelConfig


@dataclass(frozen=True)
class Case:
    """extends: (request whose first slots it shares or -1, how many, further slots before the new tokens, new tokens)."""

    head_dim: int
    kv_heads: int
    ratio: int
    window: int | None
    soft_cap: float | None
    threads: int
    extends: tuple[tuple[int, int, int, int], ...]
    seed: int


def cases() -> st.SearchStrategy[Case]:
    extend = st.tuples(
        st.integers(-1, 8),
        st.integers(0, 500),
        st.integers(0, 300),
        st.sampled_from([1, 1, 1, 2, 5, 13, 40, 130]),
    )
    return st.builds(
        Case,
        head_dim=st.sampled_from([2, 24, 32, 64, 80, 96, 128]),
        kv_heads=st.integers(1, 3),
        ratio=st.integers(1, 8),
        window=st.sampled_from([None, None, 1, 7, 64, 200]),
        soft_cap=st.sampled_from([None, None, 2.0, 30.0]),
        threads=st.integers(1, 3),
        extends=st.lists(extend, min_size=1, max_size=9).map(tuple),
        seed=st.integers(0, 2**31),
    )


# Eight decodes over one long context, of which two pairs share more, and the chunk that is computing part of it.
TREE = Case(
    64, 3, 3, None, None, 2, ((-1, 0, 700, 1), *((0, 500, 40, 1),) * 4, (1, 540, 70, 1), (1, 540, 90, 3)), 1
)
PREFILL = Case(64, 3, 3, None, None, 2, ((-1, 0, 0, 400),), 2)


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.02, torch.float16: 0.002}


def random_batch(case: Case) -> tuple[Batch, int]:
    """The batch, and how many slots there are."""
    random = np.random.default_rng(case.seed)
    total = 1 + sum(before + new for _, _, before, new in case.extends)
    fresh = iter(random.permutation(np.arange(1, total + 1, dtype=np.int32)).tolist())
    extends: list[Extend] = []
    for shared, length, before, new in case.extends:
        common = extends[shared % len(extends)].slots[:length] if shared >= 0 and extends else []
        slots = np.array([*common, *(next(fresh) for _ in range(before + new))], np.int32)
        extends.append(Extend(np.zeros(new, np.int32), len(slots) - new, slots, new))
    order = random.permutation(len(extends))
    return pack([extends[i] for i in order], torch.device("cpu")), total


def shape_of(case: Case) -> AttentionShape:
    heads = case.kv_heads * case.ratio
    return AttentionShape(
        heads, case.kv_heads, case.head_dim, case.head_dim**-0.5, (case.window,), case.soft_cap
    )


def pool_of(case: Case, slots: int, dtype: torch.dtype) -> KVPool:
    config = ModelConfig(
        architecture="llama",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=case.kv_heads * case.ratio,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        context_length=4096,
        norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        tied_head=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(case.window,),
    )
    pool = KVPool(config, slots, dtype)
    generator = torch.Generator().manual_seed(case.seed)
    for tensor in (*pool.keys, *pool.values):
        tensor[1:] = torch.randn(tensor[1:].shape, generator=generator).to(dtype)
    return pool


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
@example(case=TREE)
@example(case=PREFILL)
def test_equals_the_reference(library, dtype, case):
    batch, slots = random_batch(case)
    generator = torch.Generator().manual_seed(case.seed)
    tokens = len(batch.token_ids)
    q = torch.randn(tokens, case.kv_heads * case.ratio, case.head_dim, generator=generator).to(dtype)
    k, v = torch.randn(2, tokens, case.kv_heads, case.head_dim, generator=generator).to(dtype)

    pool = pool_of(case, slots, dtype)
    native = NativeAttention(shape_of(case), pool, library, case.threads)
    native.plan(batch)
    got = native.run(q, k, v, 0)

    exact = KVPool.__new__(KVPool)  # the same numbers in float32
    exact.slots = slots
    exact.keys, exact.values = [pool.keys[0].float()], [pool.values[0].float()]
    reference = TorchAttention(shape_of(case), exact, batch_decodes=False)
    reference.plan(batch)
    want = reference.run(q.float(), k.float(), v.float(), 0)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, atol=TOLERANCE[dtype], rtol=0)


def test_shared_slots_are_read_together(library):
    """Eight decodes over one prefix of 1,000 slots, and two over half of it."""
    prefix = np.arange(1, 1001, dtype=np.int32)
    extends = []
    for i in range(10):
        kept = 1000 if i < 8 else 500
        own = np.arange(1001 + 20 * i, 1021 + 20 * i, dtype=np.int32)
        extends.append(Extend(np.zeros(1, np.int32), kept + 19, np.concatenate([prefix[:kept], own]), 1))
    case = Case(32, 1, 3, None, None, 2, (), 0)
    native = NativeAttention(shape_of(case), pool_of(case, 1300, torch.float32), library, case.threads)
    native.plan(pack(extends, torch.device("cpu")))
    native.run(torch.randn(10, 3, 32), torch.randn(10, 1, 32), torch.randn(10, 1, 32), 0)
    assert native.keys_read == 1000 + 10 * 20


def test_what_others_are_computing_is_not_shared(library):
    """The owner of a prefix that computes it in this step sees it causally; its followers share all of it."""
    prefix = np.arange(1, 201, dtype=np.int32)
    extends = [Extend(np.zeros(200, np.int32), 0, prefix, 200)]
    for i in range(3):
        own = np.arange(201 + 2 * i, 203 + 2 * i, dtype=np.int32)
        extends.append(Extend(np.zeros(2, np.int32), 200, np.concatenate([prefix, own]), 2))
    case = Case(32, 1, 1, None, None, 1, (), 0)
    native = NativeAttention(shape_of(case), pool_of(case, 300, torch.float32), library, case.threads)
    native.plan(pack(extends, torch.device("cpu")))
    native.run(torch.randn(206, 1, 32), torch.randn(206, 1, 32), torch.randn(206, 1, 32), 0)
    panels = (66, 133, 200)  # rows of the owner that share a pass over the keys, up to the last one's
    assert native.keys_read == sum(panels) + 200 + 3 * 2
