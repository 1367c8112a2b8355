"""The flashinfer backend with the reference in the library's place, against the ``torch`` backend."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from types import SimpleNamespace

import flashinfer_reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_models import make_config, make_decoder
from paged_batches import extends_of, packed

from trellis.errors import ModelLoadError
from trellis.runtime.attention import (
    AttentionShape,
    create_attention,
    flashinfer_backend,
    registry,
)
from trellis.runtime.attention.cascade import CascadeRule
from trellis.runtime.attention.flashinfer_backend import (
    FlashInferAttention,
    why_not,
    workspace_bytes,
)
from trellis.runtime.attention.paged_layout import MisalignedPages
from trellis.runtime.attention.torch_reference import TorchAttention
from trellis.runtime.executor import ModelRunner
from trellis.runtime.executor.batch import Batch, pack
from trellis.runtime.executor.contract import Extend

HEAD_DIM = 16
SLOTS = 1023
EAGER = CascadeRule(levels=3, min_keys=4, min_saved=0.0)
NEVER = CascadeRule(min_keys=1 << 30)
REQUESTS = st.lists(
    st.tuples(st.integers(-1, 1), st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6
)
DECODES = st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 40), st.just(1)), min_size=1, max_size=8)


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual one takes longer to clear than everything else."""
    monkeypatch.setattr(flashinfer_backend, "MIN_WORKSPACE", 1 << 16)


class Pool:
    """As a KVPool: two layers of random keys and values."""

    page_size = 1

    def __init__(self, kv_heads: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = (SLOTS + 1, kv_heads, HEAD_DIM)
        self.keys = [torch.randn(size, generator=generator).to(dtype) for _ in range(2)]
        self.values = [torch.randn(size, generator=generator).to(dtype) for _ in range(2)]

    def store(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.keys[layer][slots] = k.to(self.keys[layer].dtype)
        self.values[layer][slots] = v.to(self.values[layer].dtype)


def backend_of(shape: AttentionShape, pool: Pool, **options: object) -> FlashInferAttention:
    options.setdefault("library", flashinfer_reference)
    return FlashInferAttention(shape, pool, **options)  # type: ignore[arg-type]


def random_qkv(tokens: int, shape: AttentionShape, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, shape.num_heads, HEAD_DIM, generator=generator)
    k, v = torch.randn(2, tokens, shape.num_kv_heads, HEAD_DIM, generator=generator)
    return q, k, v


def check(shape: AttentionShape, batch: Batch, backend: FlashInferAttention, pool: Pool) -> None:
    """Both layers of a planned batch, results and what is stored, against the torch backend."""
    expected = Pool(shape.num_kv_heads)
    oracle = TorchAttention(shape, expected)  # type: ignore[arg-type]
    oracle.plan(batch)
    for layer in range(2):
        q, k, v = random_qkv(len(batch.token_ids), shape, seed=layer)
        want = oracle.run(q, k, v, layer)
        torch.testing.assert_close(backend.run(q, k, v, layer), want, atol=2e-5, rtol=0)
        assert torch.equal(pool.keys[layer], expected.keys[layer])
        assert torch.equal(pool.values[layer], expected.values[layer])


@given(
    requests=st.one_of(REQUESTS, DECODES),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (8, 2), (5, 1)]),
    windows=st.sampled_from([(None, None), (None, 6), (3, 6)]),
    soft_cap=st.sampled_from([None, 1.5]),
    page_size=st.sampled_from([1, 16]),
    rule=st.sampled_from([EAGER, NEVER]),
    seed=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_torch_backend(requests, heads, windows, soft_cap, page_size, rule, seed):
    shape = AttentionShape(*heads, HEAD_DIM, 0.3, windows, soft_cap)
    pool = Pool(shape.num_kv_heads)
    backend = backend_of(shape, pool, page_size=page_size, rule=rule)
    batch = packed(requests, shared=[32, 18], page_size=page_size, slots=SLOTS, seed=seed)
    backend.plan(batch)
    if rule is NEVER or set(windows) == {3, 6}:
        assert backend.cascade is None
    check(shape, batch, backend, pool)


SHAPE = AttentionShape(4, 2, HEAD_DIM, 0.3, (None, 6))


def test_one_backend_plans_step_after_step():
    pool = Pool(2)
    backend = backend_of(SHAPE, pool, rule=EAGER)
    for requests in ([(-1, 0, 9)], [(0, 3, 1), (0, 0, 1)], [(-1, 9, 1)], [(0, 3, 2), (-1, 5, 1), (0, 0, 1)]):
        for tensors, fresh in ((pool.keys, Pool(2).keys), (pool.values, Pool(2).values)):
            for tensor, values in zip(tensors, fresh, strict=True):
                tensor.copy_(values)
        batch = packed(requests, shared=[20], slots=SLOTS)
        backend.plan(batch)
        check(SHAPE, batch, backend, pool)


@pytest.mark.parametrize(
    ("requests", "rule", "wrappers"),
    [
        ([(-1, 5, 1), (-1, 0, 1)], EAGER, {"BatchDecode": 2}),
        ([(-1, 5, 1), (-1, 0, 3)], EAGER, {"BatchPrefill": 2}),
        ([(0, 5, 1), (0, 0, 1)], EAGER, {"MultiLevel": 1, "BatchDecode": 1}),
        ([(0, 5, 1), (0, 0, 3)], EAGER, {"MultiLevel": 1, "BatchPrefill": 1}),
        ([(0, 5, 1), (0, 0, 3)], NEVER, {"BatchPrefill": 2}),
    ],
)
def test_each_batch_has_its_wrapper(requests, rule, wrappers):
    """One for each window; keys that are shared are read together only in layers without one."""
    made: list[object] = []
    planned: dict[str, int] = {}

    def counting(name):
        kind = name.partition("WithPaged")[0].removesuffix("CascadeAttentionWrapper")

        class Counting(getattr(flashinfer_reference, name)):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                made.append(self)

            def plan(self, *args, **options):
                super().plan(*args, **options)
                planned[kind] = planned.get(kind, 0) + 1

        return Counting

    names = (
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
    )
    library = SimpleNamespace(
        **{name: counting(name) for name in names},
        append_paged_kv_cache=flashinfer_reference.append_paged_kv_cache,
    )
    backend = backend_of(SHAPE, Pool(2), library=library, rule=rule)
    planned.clear()
    backend.plan(packed(requests, shared=[32], slots=SLOTS))
    known = len(made)
    backend.plan(packed(requests, shared=[32], slots=SLOTS))
    assert planned == {kind: 2 * count for kind, count in wrappers.items()}
    assert len(made) == known  # the second step used the same ones again


def test_kernels_that_do_not_run_are_told_at_the_start():
    class Failing(flashinfer_reference.BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *_args, **_options):
            raise RuntimeError("no compiler")

    library = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=flashinfer_reference.BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper=Failing,
        append_paged_kv_cache=flashinfer_reference.append_paged_kv_cache,
    )
    with pytest.raises(ModelLoadError, match="its kernels failed with RuntimeError: no compiler"):
        backend_of(SHAPE, Pool(2), library=library)


def test_trying_the_kernels_changes_nothing():
    pool = Pool(2)
    backend_of(SHAPE, pool)
    for tensors, fresh in ((pool.keys, Pool(2).keys), (pool.values, Pool(2).values)):
        assert all(map(torch.equal, tensors, fresh))


def graph_batch(requests, size, buffer):
    """Decodes padded to ``size`` with the sink, as the runtime pads them; the table of slots is a part of a buffer."""
    padding = Extend(np.zeros(1, np.int32), 0, np.zeros(1, np.int32), 1)
    extends = extends_of(requests, shared=[32], slots=SLOTS)
    batch = pack([*extends, *[padding] * (size - len(extends))], torch.device("cpu"))
    buffer[: len(batch.slots)] = batch.slots
    return dataclasses.replace(batch, slots=buffer)


@pytest.mark.parametrize("windows", [(None, None), (None, 6)])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_graphs_read_the_same_tensors_each_time(windows, heads):
    shape = AttentionShape(*heads, HEAD_DIM, 0.3, windows)
    pool = Pool(shape.num_kv_heads)
    backend = backend_of(shape, pool)
    buffer = torch.zeros(500, dtype=torch.int32)
    oracle = TorchAttention(shape, pool)  # type: ignore[arg-type]
    places = None
    for requests in ([], [(0, 4, 1), (-1, 30, 1)], [(-1, 0, 1), (0, 20, 1), (0, 0, 1)]):
        batch = graph_batch(requests, 4, buffer)
        backend.plan_graph(batch)
        now = [
            t.data_ptr() for t in vars(backend._places).values()
        ]  # what a graph would read, whatever is planned
        places = places or now
        assert now == places
        oracle.plan(dataclasses.replace(batch, slots=buffer[: len(batch.flat.slots)]))
        for layer in range(2):
            q, k, v = random_qkv(4, shape, seed=layer)
            got = backend.run(q, k, v, layer)
            torch.testing.assert_close(got, oracle.read(q, layer), atol=2e-5, rtol=0)
    assert len(backend._graphs) == 1
    assert len(backend._graphs[4].wrappers) == len(set(windows))
    backend.plan_graph(graph_batch([(0, 4, 1)], 2, buffer))
    assert set(backend._graphs) == {4, 2}
    indices = [graph.indices for graph in backend._graphs.values()]
    assert indices[0].data_ptr() == indices[1].data_ptr(), (
        "room for a batch's slots is taken once, not for each size"
    )
    backend.plan_graph(graph_batch([(0, 4, 1)], 3, torch.zeros(600, dtype=torch.int32)))
    assert len(backend._graphs[3].indices) == 600
    assert backend._graphs[4].indices.data_ptr() == indices[0].data_ptr(), "a graph's memory never moves"


def test_graphs_and_plain_steps_take_turns():
    pool = Pool(2)
    backend = backend_of(SHAPE, pool)
    buffer = torch.zeros(500, dtype=torch.int32)
    for _ in range(2):
        backend.plan_graph(graph_batch([(0, 4, 1)], 2, buffer))
        for tensors, fresh in ((pool.keys, Pool(2).keys), (pool.values, Pool(2).values)):
            for tensor, values in zip(tensors, fresh, strict=True):
                tensor.copy_(values)
        batch = packed([(-1, 7, 2)], slots=SLOTS)
        backend.plan(batch)
        check(SHAPE, batch, backend, pool)


def test_a_step_that_shares_enough_is_no_graph(monkeypatch):
    """The reason is told; what is saved is weighed against the time that launching takes."""
    extends = extends_of([(0, 3, 1), (0, 0, 1), (0, 2, 1)], shared=[300], slots=SLOTS)
    backend = backend_of(SHAPE, Pool(2))
    assert backend.no_graph_for(extends) is None
    monkeypatch.setattr(flashinfer_backend, "LAUNCH_BYTES", 2 * 300 * 2 * 2 * HEAD_DIM * 4)
    assert "share a long beginning" in str(backend.no_graph_for(extends))
    assert backend.no_graph_for(extends[:2]) is None
    windows = AttentionShape(4, 2, HEAD_DIM, 0.3, (6, 6))
    assert backend_of(windows, Pool(2)).no_graph_for(extends) is None


def test_pages_that_are_not_whole_are_refused():
    backend = backend_of(SHAPE, Pool(2), page_size=16)
    with pytest.raises(MisalignedPages, match="with pages of 16 slots"):
        backend.plan(packed([(-1, 7, 2)], page_size=1, slots=SLOTS, seed=1))


def test_keys_of_eight_bits_are_stored_and_read():
    shape = AttentionShape(4, 2, HEAD_DIM, 0.3, (None, None))
    pool = Pool(2, dtype=torch.float8_e4m3fn)
    backend = backend_of(shape, pool, rule=EAGER)
    batch = packed([(0, 5, 1), (0, 0, 3)], shared=[32], slots=SLOTS)
    backend.plan(batch)
    assert backend.cascade is None
    wide = Pool(2)
    wide.keys, wide.values = ([t.float() for t in tensors] for tensors in (pool.keys, pool.values))
    oracle = TorchAttention(shape, wide)  # type: ignore[arg-type]
    oracle.plan(batch)
    q, k, v = (t.bfloat16() for t in random_qkv(4, shape, seed=0))
    got = backend.run(q, k, v, 0)
    assert got.dtype is torch.bfloat16
    want = oracle.run(q.float(), *(t.to(torch.float8_e4m3fn).float() for t in (k, v)), 0)
    torch.testing.assert_close(got.float(), want, atol=0.02, rtol=0)


@torch.inference_mode()
def test_a_decoder_computes_the_same_with_it():
    """Steps of a model: prompts that share a beginning, then what follows, in the order that a server computes them."""
    model = make_decoder(make_config(windows=(None, 6, None)), torch.float32)
    ours, theirs = ModelRunner(model, SLOTS, "torch"), ModelRunner(model, SLOTS, "torch")
    ours.step.attention = backend_of(AttentionShape.of(model.config), ours.pool, rule=EAGER)
    requests = [(0, 0, 5), (0, 0, 1), (-1, 0, 7), (0, 0, 2)]
    whole = extends_of(requests, shared=[24], slots=SLOTS)
    first = Extend(np.arange(24, dtype=np.int32), 0, whole[0].slots[:24], 24)
    for runner in (ours, theirs):
        runner.forward([first])
    for step in (whole, next_tokens(whole)):
        got, want = ours.forward(step), theirs.forward(step)
        assert ours.step.attention.cascade is not None
        torch.testing.assert_close(got.take(range(len(got))), want.take(range(len(want))), atol=1e-4, rtol=0)


def next_tokens(extends: list[Extend]) -> list[Extend]:
    """A decode after each, in slots that nobody has."""
    used = {int(slot) for extend in extends for slot in extend.slots}
    free = (slot for slot in range(1, SLOTS) if slot not in used)
    return [
        Extend(np.array([3], np.int32), len(e.slots), np.append(e.slots, next(free)).astype(np.int32), 0)
        for e in extends
    ]


class TestWrongCallsFail:
    """What the kernels would crash or compute nonsense on is refused by the reference as well."""

    def decode(self, **graph):
        workspace = torch.zeros(64, dtype=torch.uint8)
        return flashinfer_reference.BatchDecodeWithPagedKVCacheWrapper(workspace, **graph)

    def tables(self, dtype=torch.int32):
        return [torch.tensor(values, dtype=dtype) for values in ([0, 2, 3], [5, 6, 7], [1, 1])]

    def pages(self):
        return torch.zeros(9, 1, 2, 4), torch.zeros(9, 1, 2, 4)

    def test_run_before_plan(self):
        with pytest.raises(RuntimeError, match="plan"):
            self.decode().run(torch.zeros(2, 4, 4), self.pages())

    def test_tables_of_the_wrong_kind(self):
        with pytest.raises(ValueError, match="int32"):
            self.decode().plan(*self.tables(torch.int64), 4, 2, 4, 1, q_data_type=torch.float32)
        indptr, indices, last = self.tables()
        with pytest.raises(ValueError, match="3 pages where indptr ends with 4"):
            self.decode().plan(torch.tensor([0, 2, 4], dtype=torch.int32), indices, last, 4, 2, 4, 1)
        with pytest.raises(ValueError, match="last_page_len"):
            self.decode().plan(indptr, indices, last * 2, 4, 2, 4, 1)
        with pytest.raises(ValueError, match="one sequence more"):
            self.decode().plan(indptr, indices, last[:1], 4, 2, 4, 1)

    def test_queries_and_pages_that_were_not_planned(self):
        wrapper = self.decode()
        wrapper.plan(*self.tables(), 4, 2, 4, 1, q_data_type=torch.float32)
        assert wrapper.run(torch.zeros(2, 4, 4), self.pages()).shape == (2, 4, 4)
        for q in (torch.zeros(3, 4, 4), torch.zeros(2, 2, 4), torch.zeros(2, 4, 4).half()):
            with pytest.raises(ValueError, match="flashinfer demands"):
                wrapper.run(q, self.pages())
        with pytest.raises(ValueError, match="pages are"):
            wrapper.run(torch.zeros(2, 4, 4), (torch.zeros(9, 2, 2, 4), torch.zeros(9, 2, 2, 4)))

    def test_a_ratio_without_kernel(self):
        with pytest.raises(ValueError, match="tensor cores"):
            self.decode().plan(*self.tables(), 10, 2, 4, 1)
        self.decode(use_tensor_cores=True).plan(*self.tables(), 10, 2, 4, 1)

    def test_more_than_was_captured(self):
        buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 3, 2)]
        names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
        wrapper = self.decode(use_cuda_graph=True, **dict(zip(names, buffers, strict=True)))
        wrapper.plan(*self.tables(), 4, 2, 4, 1)
        assert buffers[1].tolist() == [5, 6, 7]
        long = [torch.tensor(v, dtype=torch.int32) for v in ([0, 2, 4], [5, 6, 7, 8], [1, 1])]
        with pytest.raises(ValueError, match="4 pages in a buffer of 3"):
            wrapper.plan(*long, 4, 2, 4, 1)
        one = [torch.tensor(v, dtype=torch.int32) for v in ([0, 2], [5, 6], [1])]
        with pytest.raises(ValueError, match="1 sequences where 2 were captured"):
            wrapper.plan(*one, 4, 2, 4, 1)
        with pytest.raises(ValueError, match="buffers"):
            self.decode(use_cuda_graph=True)


def test_merged_results_are_those_of_all_keys():
    generator = torch.Generator().manual_seed(0)
    scores, values = torch.randn(7, generator=generator), torch.randn(7, 4, generator=generator)

    def part(keys):
        return (scores[keys].softmax(0) @ values[keys])[None, None], (
            scores[keys].logsumexp(0) / np.log(2)
        ).view(1, 1)

    parts = [part(slice(0, 3)), part(slice(3, 7)), (torch.zeros(1, 1, 4), torch.full((1, 1), -torch.inf))]
    got = flashinfer_reference.merged([out for out, _ in parts], [lse for _, lse in parts])
    torch.testing.assert_close(got[0, 0], scores.softmax(0) @ values)


def test_why_it_cannot_be_used():
    assert "CUDA" in str(why_not(SHAPE, Pool(2)))  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match="'flashinfer' cannot be used: it runs on CUDA devices"):
        create_attention("flashinfer", SHAPE, Pool(2))  # type: ignore[arg-type]
    there = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    pool = SimpleNamespace(keys=[there])
    assert "heads of 64, 128, 256, not 16" in str(why_not(SHAPE, pool))  # type: ignore[arg-type]
    fits = dataclasses.replace(SHAPE, head_dim=128)
    wide = SimpleNamespace(keys=[SimpleNamespace(device=there.device, dtype=torch.float32)])
    assert "float32" in str(why_not(fits, wide))  # type: ignore[arg-type]
    missing = importlib.util.find_spec("flashinfer") is None
    assert ("not installed" in str(why_not(fits, pool))) == missing  # type: ignore[arg-type]


def test_auto_takes_what_there_is(monkeypatch, caplog):
    pool = Pool(2)
    assert create_attention("auto", SHAPE, pool).name == "torch"  # type: ignore[arg-type]
    pool.keys[0] = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)  # type: ignore[assignment]
    monkeypatch.setitem(registry.BACKENDS, "triton", "no_such_module:Backend")
    with caplog.at_level("INFO"):
        assert create_attention("auto", SHAPE, pool).name == "torch"  # type: ignore[arg-type]
    assert "'flashinfer' cannot be used: it has kernels for heads of 64, 128, 256" in caplog.text
    assert "'triton' cannot be used: No module named" in caplog.text


def test_workspace_holds_the_partial_results(monkeypatch):
    """Of as many blocks as run at once, and of a tile for each request of a graph."""
    monkeypatch.undo()
    llama = AttentionShape(32, 8, 128, 0.1, (None,))
    blocks = 2 * 132 // 8
    assert workspace_bytes(llama, 132) >= 32 * blocks * 128 * 129 * 4
    assert workspace_bytes(llama, 132, graph_rows=512) >= 32 * 512 * 16 * 129 * 4
    assert workspace_bytes(AttentionShape(8, 8, 64, 0.1, (None,)), 1, graph_rows=1) == 128 << 20


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed on this machine"
)
@pytest.mark.parametrize(
    "name",
    [
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
        "append_paged_kv_cache",
    ],
)
def test_the_library_has_the_arguments_of_the_reference(name):
    """In the same order where they are given by place, and with the same names."""
    import flashinfer

    ours, theirs = getattr(flashinfer_reference, name), getattr(flashinfer, name)
    methods = ("__init__", "plan", "run") if inspect.isclass(ours) else ("__call__",)
    for method in methods:
        mine = inspect.signature(getattr(ours, method) if inspect.isclass(ours) else ours)
        real = inspect.signature(getattr(theirs, method) if inspect.isclass(ours) else theirs)
        if any(p.kind is p.VAR_KEYWORD for p in real.parameters.values()):
            real = inspect.signature(theirs._plan_impl)
        by_place = [p.name for p in mine.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert [p for p in real.parameters if p in by_place][: len(by_place)] == by_place, (name, method)
        assert set(mine.parameters) <= set(real.parameters), (name, method)
