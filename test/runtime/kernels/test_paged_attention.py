"""The Triton attention backend against the reference, over ragged batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

from trellis.errors import ModelLoadError
from trellis.runtime.attention import triton_backend
from trellis.runtime.attention.base import AttentionShape
from trellis.runtime.attention.registry import create_attention
from trellis.runtime.attention.torch_reference import TorchAttention
from trellis.runtime.attention.triton_backend import TritonAttention, factors
from trellis.runtime.executor.batch import Batch, pack
from trellis.runtime.executor.contract import Extend
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.kernels import launch
from trellis.runtime.models import ModelConfig

COVERS = ("paged_attention", "merge_pieces")

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TOLERANCE_ON_DEVICE = {**TOLERANCE, torch.float32: 1e-4}
"""Where factors of float32 are taken apart in three, of 11 bits each."""


@dataclass(frozen=True)
class Case:
    """extends: (index of the extend whose first slots it shares or -1, how many, further slots before the new tokens, new
    tokens). stored: type of the pool; None for dtype."""

    extends: tuple[tuple[int, int, int, int], ...]
    head_dim: int = 64
    kv_heads: int = 1
    ratio: int = 1
    windows: tuple[int | None, ...] = (None,)
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None
    seed: int = 0

    @property
    def shape(self) -> AttentionShape:
        heads = self.kv_heads * self.ratio
        return AttentionShape(
            heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, self.windows, self.soft_cap
        )

    def pool(self, slots: int, device: torch.device) -> KVPool:
        pool = KVPool(config_of(self), slots, self.stored or self.dtype, str(device))
        generator = torch.Generator().manual_seed(self.seed)
        for tensor in (*pool.keys, *pool.values):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
            tensor.view(torch.uint8)[0] = 0xFF  # NaN in the sink, which nobody may read
        return pool

    def random(self, tokens: int, heads: int, device: torch.device) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + heads)
        return torch.randn(tokens, heads, self.head_dim, generator=generator).to(self.dtype).to(device)


def config_of(case: Case) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_layers=len(case.windows),
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
        sliding_windows=case.windows,
    )


def batch_of(case: Case, device: torch.device) -> tuple[Batch, int]:
    """The batch, and how many slots there are."""
    random = np.random.default_rng(case.seed)
    total = sum(before + new for _, _, before, new in case.extends)
    fresh = iter(random.permutation(np.arange(1, total + 1, dtype=np.int32)).tolist())
    extends: list[Extend] = []
    for shared, length, before, new in case.extends:
        common = extends[shared % len(extends)].slots[:length] if shared >= 0 and extends else []
        slots = np.array([*common, *(next(fresh) for _ in range(before + new))], np.int32)
        extends.append(Extend(np.zeros(new, np.int32), len(slots) - new, slots, new))
    return pack(extends, device), total


def reference(case: Case, pool: KVPool, batch: Batch, q: torch.Tensor, layer: int) -> torch.Tensor:
    """In float32, on the CPU, from what lies in the pool."""
    exact = KVPool.__new__(KVPool)
    exact.keys, exact.values = ([t.cpu().float() for t in kept] for kept in (pool.keys, pool.values))
    for tensor in (*exact.keys, *exact.values):
        tensor[0] = 0
    on_host = replace(batch, slots=batch.slots.cpu(), write_slots=batch.write_slots.cpu())
    attention = TorchAttention(case.shape, exact, batch_decodes=False)
    attention.plan(on_host)
    return attention.read(q.cpu().float(), layer)


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    tolerance = (TOLERANCE if got.device.type == "cpu" else TOLERANCE_ON_DEVICE)[dtype]
    torch.testing.assert_close(got.cpu(), want, atol=tolerance, rtol=0)


def check(case: Case, device: torch.device) -> TritonAttention:
    batch, slots = batch_of(case, device)
    pool = case.pool(slots, device)
    attention = TritonAttention(case.shape, pool)
    attention.plan(batch)
    tokens, kv_heads = len(batch.token_ids), case.kv_heads
    q = case.random(tokens, kv_heads * case.ratio, device)
    for layer in range(len(case.windows)):
        k, v = case.random(2 * tokens, kv_heads, device).view(2, tokens, kv_heads, case.head_dim)
        got = attention.run(q, k, v, layer)
        for kept, new in ((pool.keys, k), (pool.values, v)):
            assert torch.equal(kept[layer].float()[batch.write_slots], new.to(kept[layer].dtype).float())
        assert got.dtype == case.dtype
        want = reference(case, pool, batch, q, layer)
        assert_near(got.float(), want, case.dtype)
    return attention


DECODES = ((-1, 0, 0, 1), (-1, 0, 5, 1), (-1, 0, 64, 1), (2, 50, 80, 1))
# A prompt, a request that shares what it is computing, a chunk, a forced run, a decode.
MIXED = ((-1, 0, 0, 44), (0, 44, 0, 3), (-1, 0, 90, 12), (-1, 0, 33, 1))
# Spans that are cut in pieces.
LONG = ((-1, 0, 400, 1), (0, 380, 3, 2), (-1, 0, 20, 1))
KINDS = {"decodes": DECODES, "mixed": MIXED, "long": LONG}


@pytest.mark.parametrize("ratio", range(1, 9))
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes_and_ratios(device, head_dim, ratio):
    check(Case(((-1, 0, 130, 1), (-1, 0, 66, 9)), head_dim, 1, ratio), device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_windows_and_caps(device, kind, soft_cap):
    check(Case(KINDS[kind], 80, 1, 3, (None, 1, 40), soft_cap), device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", [None, FP8], ids=["same", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types(device, kind, dtype, stored):
    if stored is FP8 and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    check(Case(KINDS[kind], 64, 2, 2, dtype=dtype, stored=stored), device)


def test_more_heads_in_a_group_than_rows_in_a_tile(device):
    check(Case(((-1, 0, 150, 1), (-1, 0, 3, 2)), 256, 1, 71), device)


def test_fp8_pool_holds_the_largest_value_of_what_is_larger(device):
    case = Case(((-1, 0, 0, 2),), stored=FP8)
    batch, slots = batch_of(case, device)
    attention = TritonAttention(case.shape, case.pool(slots, device))
    attention.plan(batch)
    new = torch.full((2, 1, 64), 1e4, device=device)
    attention.store(new, -new, 0)
    for kept, largest in ((attention.pool.keys, 448.0), (attention.pool.values, -448.0)):
        assert (kept[0][batch.write_slots].float() == largest).all()


def test_queries_may_be_part_of_a_wider_tensor(device):
    case = Case(MIXED, 64, 2, 2)
    batch, slots = batch_of(case, device)
    attention = TritonAttention(case.shape, case.pool(slots, device))
    attention.plan(batch)
    heads = case.random(len(batch.token_ids), 8, device)
    dense = attention.read(heads[:, :4].contiguous(), 0)
    assert torch.equal(attention.read(heads[:, :4], 0), dense)
    turned = heads[:, :4].transpose(1, 2).contiguous().transpose(1, 2)
    assert turned.stride(-1) != 1
    assert torch.equal(attention.read(turned, 0), dense)


def test_slots_past_two_to_the_31_values(device):
    """Of one byte each, in memory that is not there before it is written."""
    slots = 2**31 // 64 + 300
    case = Case(((-1, 0, 0, 9), (-1, 0, 90, 1)), 64, 1, 1, stored=FP8)
    shape = replace(case.shape, scale=1.0)
    config = config_of(case)
    pool = KVPool(config, slots, FP8, str(device))
    last = np.arange(slots - 99, slots + 1, dtype=np.int32)
    extends = [Extend(np.zeros(9, np.int32), 0, last[:9], 9), Extend(np.zeros(1, np.int32), 90, last[9:], 1)]
    batch = pack(extends, device)
    random = torch.Generator().manual_seed(1)
    low = [torch.randn(100, 1, 64, generator=random).to(FP8) for _ in range(2)]
    for kept, values in zip((pool.keys[0], pool.values[0]), low, strict=True):
        kept.view(torch.uint8)[slots - 99 :] = values.view(torch.uint8).to(device)
    attention = TritonAttention(shape, pool)
    attention.plan(batch)
    q = case.random(10, 1, device)
    got = attention.read(q, 0)
    k, v = (values.float()[:, 0] for values in low)
    for row, seen in [(i, slice(0, i + 1)) for i in range(9)] + [(9, slice(9, 100))]:
        want = (k[seen] @ q[row, 0].cpu()).softmax(0) @ v[seen]
        assert_near(got[row, 0], want)


def cases() -> st.SearchStrategy[Case]:
    extend = st.tuples(
        st.integers(-1, 5),
        st.integers(0, 150),
        st.integers(0, 200),
        st.sampled_from([1, 1, 1, 2, 5, 13, 40]),
    )
    return st.builds(
        Case,
        extends=st.lists(extend, min_size=1, max_size=3).map(tuple),
        head_dim=st.sampled_from([8, 64, 80, 96, 128, 256]),
        kv_heads=st.integers(1, 2),
        ratio=st.integers(1, 8),
        windows=st.sampled_from([None, None, 1, 7, 64, 200]).map(lambda window: (window,)),
        soft_cap=st.sampled_from([None, None, 2.0, 30.0]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        seed=st.integers(0, 2**31),
    )


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
@example(case=Case(((-1, 0, 0, 1),), 8))
def test_random_batches(device, case):
    check(case, device)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_many_random_batches(device, case):
    check(case, device)


def launches(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What ``read`` launches from now on, to be launched again: what a captured graph does."""
    recorded: list[Callable[[], None]] = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                recorded.append(lambda: self.kernel[grid](*args, **kwargs))
                recorded[-1]()

            return launch

    for name in ("attend_tiles", "merge_pieces"):
        monkeypatch.setattr(triton_backend, name, Recorder(getattr(triton_backend, name)))
    return recorded


def test_launches_of_a_graph_serve_later_batches(device, monkeypatch):
    """Lengths, slots and pieces come from tables that the launches read: only the number of decodes is the same."""
    case = Case(((-1, 0, 0, 1),) * 3, 64, 1, 2, (None, 30))
    pool = case.pool(1200, device)
    attention = TritonAttention(case.shape, pool)
    recorded = launches(monkeypatch)
    q = case.random(3, 2, device)
    place = torch.empty(1200, dtype=torch.int32, device=device)
    outs = []
    for contexts in ([1, 1, 1], [300, 2, 130], [40, 500, 200]):
        random = np.random.default_rng(len(outs))
        slots = np.split(random.permutation(np.arange(1, 1201, dtype=np.int32)), np.cumsum(contexts))
        extends = [
            Extend(np.zeros(1, np.int32), n - 1, own, 1) for n, own in zip(contexts, slots, strict=False)
        ]
        batch = pack(extends, device)
        place[: len(batch.slots)] = batch.slots
        attention.plan_graph(replace(batch, slots=place))
        if not outs:
            outs = [attention.read(q, layer) for layer in range(2)]
        else:
            for launch in recorded:
                launch()
        for layer, out in enumerate(outs):
            want = reference(case, pool, batch, q, layer)
            assert_near(out, want)
    assert len(recorded) == 4


def test_what_cannot_be_read_is_refused_by_name(device, monkeypatch):
    case = Case(DECODES)
    with pytest.raises(ModelLoadError, match=r"'triton' cannot be used: it reads pools of float32.*float64"):
        create_attention("triton", case.shape, KVPool(config_of(case), 4, torch.float64, str(device)))
    with pytest.raises(
        ModelLoadError, match=r"computes in float32, bfloat16, float16, not in torch[.]float64"
    ):
        factors(torch.float64)
    pool = KVPool(config_of(case), 4, FP8, str(device))
    monkeypatch.setattr(triton_backend, "capability", lambda _: (8, 0))
    with pytest.raises(ModelLoadError, match=r"float8_e4m3fn needs .* 8\.9 or more, and this one has 8\.0"):
        TritonAttention(case.shape, pool)
    half = KVPool(config_of(case), 4, torch.float16, str(device))
    assert TritonAttention(case.shape, half).pool is half
    monkeypatch.setattr(triton_backend, "capability", lambda _: (7, 5))
    with pytest.raises(ModelLoadError, match=r"it needs .* 8\.0 or more, and this one has 7\.5"):
        TritonAttention(case.shape, half)
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    with pytest.raises(ModelLoadError, match="TRITON_INTERPRET=1 before triton is imported"):
        TritonAttention(case.shape, KVPool(config_of(case), 4, torch.float32, "cpu"))


def test_where_kernels_can_run(monkeypatch):
    assert launch.why_not(torch.device("cpu")) is None or not launch.interpreted()
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    assert launch.why_not(torch.device("cuda")) is None
    assert "tensors are on cpu" in str(launch.why_not(torch.device("cpu")))
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda _: None)
    assert launch.why_not(torch.device("cuda")) == "triton is not installed (pip install triton)"


def test_reading_before_planning_is_an_error(device):
    case = Case(DECODES)
    attention = TritonAttention(case.shape, case.pool(4, device))
    with pytest.raises(RuntimeError, match=r"call plan\(batch\) first"):
        attention.read(case.random(1, 1, device), 0)
