"""Attention by our Triton kernels: on a CUDA device, and in Triton's interpreter on a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from trellis.errors import ModelLoadError
from trellis.runtime.attention.base import AttentionBackend, AttentionShape
from trellis.runtime.attention.paged_layout import host_tensor
from trellis.runtime.attention.tiles import Split, Work, by_height, cut, padded
from trellis.runtime.executor.batch import Batch, FlatBatch
from trellis.runtime.executor.contract import IntArray
from trellis.runtime.executor.kv_pool import FP8, KVPool
from trellis.runtime.kernels.launch import capability, interpreted, processors, why_not
from trellis.runtime.kernels.merge_pieces import merge_pieces
from trellis.runtime.kernels.paged_attention import attend_tiles
from trellis.runtime.kernels.tile_shapes import TileShape, block_dim, tile_shapes

FACTORS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Compute capabilities. Before the first, tiles do not fit in shared memory, and Triton multiplies without tensor cores.
SINCE, FP8_SINCE = (8, 0), (8, 9)

# Spans are cut so that each multiprocessor has about so many programs to run. With more the load is better balanced, and
# more results have to be merged.
PROGRAMS = 4
LEAST_KEYS = 128  # of a piece; with fewer, a program is mostly its start and its end
BLOCK_PIECES = 16
MERGE_WARPS = 4
LOG2_E = math.log2(math.e)
ALIGNED = 4  # int32 values: a kernel is compiled anew for a pointer that is not aligned to 16 bytes


@dataclass(frozen=True)
class _Launch:
    """What layers with that window launch for tiles of that shape. rows: of a tile, that are in use at most."""

    window: int | None
    shape: TileShape
    rows: int
    work: Work


@dataclass(frozen=True)
class _Plan:
    """table: int32, on the device: the items and the merges of each launch, one after the other. starts: where."""

    slots: Tensor
    launches: list[_Launch]
    table: Tensor
    starts: list[tuple[int, int]]


class TritonAttention(AttentionBackend):
    """Reads pools of float32, float16 and bfloat16, and of e4m3 with a scale of 1.

    Raises ModelLoadError where Triton's kernels cannot run, or cannot read the pool.
    """

    name = "triton"
    no_graphs = None

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        super().__init__(shape, pool)
        self._device, dtype = pool.keys[0].device, pool.keys[0].dtype
        reason = why_not(self._device) or _unreadable(dtype, self._device)
        if reason is not None:
            raise ModelLoadError(f"attention backend 'triton' cannot be used: {reason}")
        self._group = shape.num_heads // shape.num_kv_heads
        self._shapes = tile_shapes(shape.head_dim, dtype, capability(self._device))
        self._budget = max(1, PROGRAMS * processors(self._device) // shape.num_kv_heads)
        # One launch uses them at a time, so all plans and graphs share them.
        rows = self._budget * shape.num_kv_heads * self._shapes[-1].height
        self._pieces = torch.empty((rows, shape.head_dim), dtype=torch.float32, device=self._device)
        self._levels = torch.empty(rows, dtype=torch.float32, device=self._device)
        self._plan: _Plan | None = None
        self._fixed: dict[int, Tensor] = {}

    def plan(self, batch: Batch) -> None:
        self.write_slots = batch.write_slots
        launches = self._work(batch.flat)
        table, starts = joined([launch.work for launch in launches])
        on_device = host_tensor(table, self._device).to(self._device, non_blocking=True)
        self._plan = _Plan(batch.slots, launches, on_device, starts)

    def plan_graph(self, batch: Batch) -> None:
        """As ``plan``, into a table that stays where it is and is as large as so many decodes can need."""
        self.write_slots = batch.write_slots
        tiles = len(batch) * -(-self._group // self._shapes[-1].height)
        launches = [
            replace(launch, work=padded(launch.work, tiles + self._budget, -(-self._budget // 2)))
            for launch in self._work(batch.flat)
        ]
        table, starts = joined([launch.work for launch in launches])
        if len(batch) not in self._fixed:
            self._fixed[len(batch)] = torch.empty(len(table), dtype=torch.int32, device=self._device)
        fixed = self._fixed[len(batch)]
        fixed.copy_(host_tensor(table, self._device), non_blocking=True)
        self._plan = _Plan(batch.slots, launches, fixed, starts)

    def store(self, k: Tensor, v: Tensor, layer: int) -> None:
        self.pool.store(layer, self.write_slots, k, v)

    def read(self, q: Tensor, layer: int) -> Tensor:
        if self._plan is None:
            raise RuntimeError(
                "attention backend 'triton' reads before it has planned; call plan(batch) first"
            )
        q = q if q.stride(-1) == 1 else q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for launch, (items, merges) in zip(self._plan.launches, self._plan.starts, strict=True):
            if launch.window == self.shape.windows[layer]:
                self._attend(self._plan, launch, self._plan.table[items:], q, layer, out)
                if len(launch.work.merges):
                    self._merge(launch, self._plan.table[merges:], out)
        return out

    def _work(self, flat: FlatBatch) -> list[_Launch]:
        launches = []
        for which, extends in by_height(flat.lengths, self._group, [s.height for s in self._shapes]):
            shape = self._shapes[which]
            rows = min(shape.height, int(flat.lengths[extends].max()) * self._group)
            split = Split(self._budget, LEAST_KEYS, shape.keys)
            for window in dict.fromkeys(self.shape.windows):
                work = cut(flat, extends, self._group, shape.height, window, split)
                launches.append(_Launch(window, shape, rows, work))
        return launches

    def _attend(
        self, plan: _Plan, launch: _Launch, items: Tensor, q: Tensor, layer: int, out: Tensor
    ) -> None:
        shape, tile, head_dim = self.shape, launch.shape, self.shape.head_dim
        cap = shape.soft_cap
        attend_tiles[(len(launch.work.items) * shape.num_kv_heads,)](
            q,
            self.pool.keys[layer],
            self.pool.values[layer],
            out,
            self._pieces,
            self._levels,
            items,
            plan.slots,
            q.stride(0),
            q.stride(1),
            shape.scale * LOG2_E if cap is None else 2 * shape.scale * LOG2_E / cap,
            1.0 if cap is None else cap * LOG2_E,
            launch.window or 0,
            KV_HEADS=shape.num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=head_dim,
            BLOCK_DIM=block_dim(head_dim),
            HEIGHT=tile.height,
            BLOCK_KEYS=tile.keys,
            CAPPED=cap is not None,
            WINDOWED=launch.window is not None,
            WHOLE=tile.whole,
            PRECISION="tf32x3",
            FACTORS=factors(q.dtype),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def _merge(self, launch: _Launch, merges: Tensor, out: Tensor) -> None:
        shape = self.shape
        merge_pieces[(len(launch.work.merges), launch.rows, shape.num_kv_heads)](
            out,
            self._pieces,
            self._levels,
            merges,
            KV_HEADS=shape.num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=shape.head_dim,
            BLOCK_DIM=block_dim(shape.head_dim),
            HEIGHT=launch.shape.height,
            BLOCK_PIECES=BLOCK_PIECES,
            num_warps=MERGE_WARPS,
        )


def joined(works: Sequence[Work]) -> tuple[IntArray, list[tuple[int, int]]]:
    """All tables as one int32 array, and where the items and the merges of each work begin in it."""
    parts, starts, at = [], [], 0
    for work in works:
        begins = []
        for table in (work.items, work.merges):
            begins.append(at)
            filled = np.pad(table.ravel(), (0, -table.size % ALIGNED))
            parts.append(filled)
            at += len(filled)
        starts.append((begins[0], begins[1]))
    return np.concatenate(parts), starts


def factors(dtype: torch.dtype) -> tl.dtype:
    """What queries of that type are multiplied as. ModelLoadError for types that are not known."""
    if dtype not in FACTORS:
        raise ModelLoadError(f"attention backend 'triton' computes in {_names(FACTORS)}, not in {dtype}")
    # The interpreter would multiply the bits of bfloat16 as whole numbers.
    return tl.float32 if interpreted() else FACTORS[dtype]


def _unreadable(dtype: torch.dtype, device: torch.device) -> str | None:
    if dtype not in FACTORS and dtype != FP8:
        return f"it reads pools of {_names((*FACTORS, FP8))}, not of {dtype}"
    what, least = (str(FP8), FP8_SINCE) if dtype == FP8 else ("it", SINCE)
    if capability(device) >= least:
        return None
    found, needed = (".".join(map(str, version)) for version in (capability(device), least))
    return f"{what} needs a GPU of compute capability {needed} or more, and this one has {found}"


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
