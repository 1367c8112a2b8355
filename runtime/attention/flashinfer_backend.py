"""Attention by flashinfer's kernels (Ye et al. 2025, arXiv:2501.01005): the default on CUDA devices where it is installed.

A step is read by one of three wrappers: the decode wrapper if every request has one new token, the prefill wrapper for
ragged extends, and the cascade wrapper where requests have enough keys in common. Layers with different windows have
wrappers of their own. Graphs have a decode wrapper for each number of requests.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trellis.errors import ModelLoadError
from trellis.runtime.attention.base import AttentionBackend, AttentionShape
from trellis.runtime.attention.cascade import Cascade, CascadeRule, plan_cascade
from trellis.runtime.attention.paged_layout import PagedLayout, Tables, lay_out, view_as_pages
from trellis.runtime.executor.batch import Batch, flatten, pack
from trellis.runtime.executor.contract import Extend
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.executor.transfer import to_device
from trellis.runtime.kernels.launch import processors

HEAD_DIMS = (64, 128, 256)  # what its kernels are compiled for, in every version since 0.2
QUERY_DTYPES = (torch.float16, torch.bfloat16)
CACHE_DTYPES = (*QUERY_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
MIN_WORKSPACE = 128 << 20  # bytes, as its documentation recommends
# Keys and values of a layer that a large GPU reads (3.3 TB/s) while the host launches the layer's kernels one by one (80 us):
# an estimate, from the figures of the device's maker and of launches in general.
LAUNCH_BYTES = 256 << 20
GRAPH_ROWS = 256  # most requests of a graph that the workspace is made for


class FlashInferAttention(AttentionBackend):
    """page_size: None for the pool's. With more than 1, every sequence must fill whole pages (see ``lay_out``), or ``plan`` raises
    MisalignedPages.

    query_dtype: of q; None takes the pool's, or bfloat16 with a pool of 8 bits. library: what to use in flashinfer's place.
    Raises ModelLoadError where flashinfer cannot be had, or has no kernels for this shape and pool, or they do not run.
    """

    name = "flashinfer"
    no_graphs = None

    def __init__(
        self,
        shape: AttentionShape,
        pool: KVPool,
        library: Any = None,
        page_size: int | None = None,
        rule: CascadeRule = CascadeRule(),  # noqa: B008 - frozen
        query_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(shape, pool)
        reason = why_not(shape, pool) if library is None else None
        if reason is not None:
            raise ModelLoadError(f"attention backend 'flashinfer' cannot be used: {reason}")
        self._library = library or importlib.import_module("flashinfer")
        page_size = page_size or pool.page_size
        self._page_size = page_size
        self._rule = rule
        keys = pool.keys[0]
        self._device, self._cache_dtype = keys.device, keys.dtype
        self._query_dtype = query_dtype or (keys.dtype if keys.dtype.itemsize > 1 else torch.bfloat16)
        size = workspace_bytes(shape, processors(keys.device))
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=keys.device)
        self._wrappers: dict[tuple[str, int], _Wrapper] = {}
        self._graphs: dict[int, _Graph] = {}
        # Of all graphs (those that have a smaller one keep it): each is planned before its replay, and they run one by one.
        self._graph_indices = torch.zeros(0, dtype=torch.int32, device=keys.device)
        self._readers: dict[int | None, Callable[[Tensor, _Pages], Tensor]] = {}
        self._places = _Places.empty(0, keys.device)
        self._pages = [_pages(pool, layer, page_size) for layer in range(len(pool.keys))]
        self._slots = [_pages(pool, layer, 1) for layer in range(len(pool.keys))]
        self.cascade: Cascade | None = None
        """Of the batch that was planned last; None if its requests read their keys apart."""
        self._try_kernels()

    def plan(self, batch: Batch) -> None:
        self.write_slots = batch.write_slots
        self._places = _Places.empty(len(batch.write_slots), self._device)
        self._places.indices.copy_(batch.write_slots)
        self.cascade = self._plan_cascade(batch)
        windows = set(self.shape.windows) - (set() if self.cascade is None else {None})
        if not windows:
            return
        layout, tables = self._tables(batch)
        for window in windows:
            if layout.queries[-1] == layout.sequences:
                wrapper = self._wrapper("decode", window)
                wrapper.plan_decodes(tables, **self._options(window))
            else:
                wrapper = self._wrapper("prefill", window)
                wrapper.plan_extends(tables, causal=True, **self._options(window))
            self._readers[window] = wrapper.run

    def plan_graph(self, batch: Batch) -> None:
        size = len(batch)
        if size not in self._graphs:
            if len(self._graph_indices) < len(batch.slots):
                self._graph_indices = torch.zeros(len(batch.slots), dtype=torch.int32, device=self._device)
            self._graphs[size] = _Graph.of(size, self._graph_indices[: len(batch.slots)])
        graph = self._graphs[size]
        self.cascade = None
        self.write_slots, self._places = batch.write_slots, graph.places
        graph.places.indices.copy_(batch.write_slots)
        _, tables = self._tables(batch)
        for window in set(self.shape.windows):
            if window not in graph.wrappers:
                graph.wrappers[window] = self._graph_wrapper(graph)
            graph.wrappers[window].plan_decodes(tables, **self._options(window))
            self._readers[window] = graph.wrappers[window].run

    def no_graph_for(self, extends: Sequence[Extend]) -> str | None:
        """Graphs read the keys of every request apart. That costs more than launching one kernel after the other where very
        many of them are the same."""
        if not self._has_cascade or len(extends) < 2:
            return None
        cascade = plan_cascade(flatten(extends), self._page_size, self._rule)
        saved = 0 if cascade is None else cascade.keys_apart - cascade.keys_read
        key = 2 * self.shape.num_kv_heads * self.shape.head_dim * self._cache_dtype.itemsize
        return (
            "its requests share a long beginning, which is read once" if saved * key >= LAUNCH_BYTES else None
        )

    def store(self, k: Tensor, v: Tensor, layer: int) -> None:
        """Every token is told as a sequence of its own with one page of one slot, so nothing is looked up."""
        if k.dtype != self._cache_dtype:
            k, v = k.to(self._cache_dtype), v.to(self._cache_dtype)
        places = self._places
        self._library.append_paged_kv_cache(
            k,
            v,
            places.sequences,
            places.positions,
            self._slots[layer],
            places.indices,
            places.indptr,
            places.last_page_len,
        )

    def read(self, q: Tensor, layer: int) -> Tensor:
        return self._readers[self.shape.windows[layer]](q, self._pages[layer])

    def _try_kernels(self) -> None:
        """flashinfer compiles a kernel when it is first used. Where it cannot, or its kernels do not run on this device, that
        is told here, and other backends can be tried."""
        pool = self.pool
        try:
            for tokens in (1, 2):  # a decode and an extend, of the sink and the slot beside it
                slots = np.arange(tokens, dtype=np.int32)
                self.plan(pack([Extend(np.zeros(tokens, np.int32), 0, slots, tokens)], self._device))
                self.store(pool.keys[0][:tokens].clone(), pool.values[0][:tokens].clone(), 0)
                size = (tokens, self.shape.num_heads, self.shape.head_dim)
                q = torch.zeros(size, dtype=self._query_dtype, device=self._device)
                for layer in {window: i for i, window in enumerate(self.shape.windows)}.values():
                    self.read(q, layer)
        except Exception as error:
            raise ModelLoadError(
                f"attention backend 'flashinfer' cannot be used: its kernels failed with {type(error).__name__}: {error}"
            ) from error

    def _tables(self, batch: Batch) -> tuple[PagedLayout, Tables]:
        layout = lay_out(batch.flat, self._page_size)
        there = batch.slots[: len(batch.flat.slots)] if self._page_size == 1 else None
        return layout, Tables.of(layout, self._device, there)

    @property
    def _has_cascade(self) -> bool:
        """Not for layers with windows: a level of shared keys does not know where the queries stand. Not for a pool of 8 bits,
        which older versions of the wrapper do not take."""
        return None in self.shape.windows and self._cache_dtype == self._query_dtype

    def _plan_cascade(self, batch: Batch) -> Cascade | None:
        """Plans it, if it pays."""
        if not self._has_cascade:
            return None
        cascade = plan_cascade(batch.flat, self._page_size, self._rule)
        if cascade is None:
            return None
        wrapper = self._wrapper("cascade", None, len(cascade.levels))
        options = self._options(None)
        del options["kv_data_type"], options["non_blocking"]
        wrapper.plan_levels(
            [Tables.of(level, self._device) for level in cascade.levels], causal=True, **options
        )
        if cascade.rows is None:
            self._readers[None] = wrapper.run
        else:
            rows = to_device(cascade.rows, self._device)
            self._readers[None] = lambda q, pages: _scattered(
                wrapper.run(q.index_select(0, rows), pages), rows
            )
        return cascade

    def _options(self, window: int | None) -> dict[str, Any]:
        """What all wrappers' ``plan`` takes by name. flashinfer counts a window's keys without the query's own."""
        return {
            "sm_scale": self.shape.scale,
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": self.shape.soft_cap,
            "q_data_type": self._query_dtype,
            "kv_data_type": self._cache_dtype,
            "non_blocking": True,
        }

    def _wrapper(self, kind: str, window: int | None, levels: int = 0) -> _Wrapper:
        key = (kind, levels or window or 0)
        if key not in self._wrappers:
            library = self._library
            if kind == "decode":
                made = library.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, "NHD", use_tensor_cores=self._tensor_cores
                )
            elif kind == "prefill":
                made = library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            else:
                made = library.MultiLevelCascadeAttentionWrapper(levels, self._workspace, "NHD")
            self._wrappers[key] = _Wrapper(made, self.shape, self._page_size, self._device)
        return self._wrappers[key]

    def _graph_wrapper(self, graph: _Graph) -> _Wrapper:
        made = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=graph.indptr,
            paged_kv_indices_buffer=graph.indices,
            paged_kv_last_page_len_buffer=graph.last_page_len,
        )
        return _Wrapper(made, self.shape, self._page_size, self._device)

    @property
    def _tensor_cores(self) -> bool:
        """They pay from four queries a key head on; below, and with keys of 16 bits, decode is bound by memory anyway, and
        the other kernel is compiled for one to three."""
        return self.shape.num_heads // self.shape.num_kv_heads >= 4 or self._cache_dtype.itemsize == 1


_Pages = tuple[Tensor, Tensor]


class _Wrapper:
    """A wrapper of flashinfer's, told the shape.

    Its ``plan`` writes to a pinned buffer and has it copied to the device behind what is queued there. With overlapped
    steps the next plan could overwrite it before that: so it first waits for the copy, which is done when the step before
    has begun.
    """

    def __init__(self, wrapper: Any, shape: AttentionShape, page_size: int, device: torch.device) -> None:
        self._wrapper = wrapper
        self._shape = (shape.num_heads, shape.num_kv_heads, shape.head_dim, page_size)
        self._copied = _event() if device.type == "cuda" else None

    def plan_decodes(self, tables: Tables, **options: Any) -> None:
        self._plan(tables.indptr, tables.indices, tables.last_page_len, **options)

    def plan_extends(self, tables: Tables, **options: Any) -> None:
        self._plan(tables.queries, tables.indptr, tables.indices, tables.last_page_len, **options)

    def plan_levels(self, levels: list[Tables], **options: Any) -> None:
        self._plan(
            [tables.queries for tables in levels],
            [tables.indptr for tables in levels],
            [tables.indices for tables in levels],
            [tables.last_page_len for tables in levels],
            **options,
        )

    def run(self, q: Tensor, pages: _Pages) -> Tensor:
        out: Tensor = self._wrapper.run(q, pages)
        return out

    def _plan(self, *tables: Any, **options: Any) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self._wrapper.plan(*tables, *self._shape, **options)
        if self._copied is not None:
            self._copied.record()


@dataclass(frozen=True)
class _Places:
    """Where new keys and values go, as ``append_paged_kv_cache`` wants it: T sequences with one page of one slot each. All
    int32 on the device."""

    sequences: Tensor
    positions: Tensor
    indices: Tensor
    indptr: Tensor
    last_page_len: Tensor

    @staticmethod
    def empty(tokens: int, device: torch.device) -> _Places:
        counting = torch.arange(tokens + 1, dtype=torch.int32, device=device)
        zeros = torch.zeros(tokens, dtype=torch.int32, device=device)
        return _Places(counting[:-1], zeros, torch.zeros_like(zeros), counting, torch.ones_like(zeros))


@dataclass(frozen=True)
class _Graph:
    """What the graph of so many decodes reads: tensors that stay where they are, int32 on the device."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    places: _Places
    wrappers: dict[int | None, _Wrapper]

    @staticmethod
    def of(size: int, indices: Tensor) -> _Graph:
        device = indices.device
        indptr, last = (torch.zeros(n, dtype=torch.int32, device=device) for n in (size + 1, size))
        return _Graph(indptr, indices, last, _Places.empty(size, device), {})


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _pages(pool: KVPool, layer: int, page_size: int) -> _Pages:
    return view_as_pages(pool.keys[layer], page_size), view_as_pages(pool.values[layer], page_size)


def _scattered(found: Tensor, rows: Tensor) -> Tensor:
    return torch.empty_like(found).index_copy_(0, rows, found)


def why_not(shape: AttentionShape, pool: KVPool) -> str | None:
    """Why flashinfer cannot read this pool for this shape, or None if it can."""
    keys = pool.keys[0]
    if keys.device.type != "cuda":
        return f"it runs on CUDA devices, and the pool is on {keys.device}"
    if shape.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        return f"it has kernels for heads of {known}, not {shape.head_dim}; 'triton' reads any size"
    if keys.dtype not in CACHE_DTYPES:
        return f"it reads 16- and 8-bit floats, not {keys.dtype}"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install 'trellis-lm[cuda]')"
    return None


def workspace_bytes(shape: AttentionShape, processors: int, graph_rows: int = GRAPH_ROWS) -> int:
    """For the partial results of contexts that are split: float32, for each query head a row and its sum of exponentials.

    The planner (``attention/scheduler.cuh``) splits into at most two blocks a processor over the key heads, of up to 128
    rows; for a graph of decodes it reserves a tile of 16 rows for each request as well. A quarter is left to spare.
    """
    ratio = shape.num_heads // shape.num_kv_heads
    split_rows = -(-2 * processors // shape.num_kv_heads) * 128
    graph_tiles = graph_rows + -(-graph_rows * ratio // 16)
    rows = max(split_rows, 16 * graph_tiles)
    needed = shape.num_heads * rows * (shape.head_dim + 1) * 4
    return max(MIN_WORKSPACE, needed * 5 // 4)
