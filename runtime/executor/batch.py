"""The tensors of one step: the extends of all requests, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trellis.runtime.executor.contract import Extend, IntArray


@dataclass(frozen=True)
class Extent:
    """Where one extend lies in the packed batch: tokens ``offset .. offset + length - 1``, which stand at positions
    ``start ..`` of their sequence and may read the sequence's ``slots`` (int64 [start + length])."""

    offset: int
    length: int
    start: int
    slots: Tensor


@dataclass(frozen=True)
class Batch:
    """token_ids, positions, write_slots: int64 [T]. extents: one an extend, in order. logits_rows: int64 [R], the packed
    tokens whose logits are wanted."""

    token_ids: Tensor
    positions: Tensor
    write_slots: Tensor
    extents: tuple[Extent, ...]
    logits_rows: Tensor


@dataclass(frozen=True)
class FlatBatch:
    """Extends, one after the other, as plain int32 arrays: token_ids [T], and for each extend its length, its start, its
    slots (start + length of them) and the first of its tokens whose logits are wanted."""

    token_ids: IntArray
    lengths: IntArray
    starts: IntArray
    slots: IntArray
    logits_from: IntArray

    @property
    def n_logits(self) -> int:
        return int((self.lengths - self.logits_from).sum())


def flatten(extends: Sequence[Extend]) -> FlatBatch:
    """ValueError if there is no extend, or one contradicts itself."""
    if not extends:
        raise ValueError("a batch needs at least one extend")
    numbers = np.array([(len(e.token_ids), e.start, len(e.slots), e.logits_from) for e in extends], np.int32)
    lengths, starts, n_slots, logits_from = np.ascontiguousarray(numbers.T)
    bad = (
        (lengths < 1)
        | (starts < 0)
        | (n_slots != starts + lengths)
        | (logits_from < 0)
        | (logits_from > lengths)
    )
    if bad.any():
        index = int(bad.argmax())
        raise ValueError(
            f"extend {index}: {lengths[index]} tokens from position {starts[index]} with {n_slots[index]} slots "
            f"and logits from {logits_from[index]} do not fit together"
        )
    return FlatBatch(
        token_ids=_joined([e.token_ids for e in extends]),
        lengths=lengths,
        starts=starts,
        slots=_joined([e.slots for e in extends]),
        logits_from=logits_from,
    )


def pack(extends: Sequence[Extend], device: torch.device) -> Batch:
    """The same as tensors, for the torch decoder. Raises as ``flatten`` does."""
    flat = flatten(extends)
    all_slots = _tensor(flat.slots, device)
    extents, rows, offset, first_slot = [], [], 0, 0
    for extend, length in zip(extends, flat.lengths.tolist(), strict=True):
        end = first_slot + extend.start + length
        extents.append(Extent(offset, length, extend.start, all_slots[first_slot:end]))
        rows.append(np.arange(offset + extend.logits_from, offset + length))
        offset += length
        first_slot = end
    starts = [extent.start - extent.offset for extent in extents]
    return Batch(
        token_ids=_tensor(flat.token_ids, device),
        positions=_tensor(np.arange(offset) + np.repeat(starts, flat.lengths), device),
        write_slots=torch.cat([extent.slots[extent.start :] for extent in extents]),
        extents=tuple(extents),
        logits_rows=_tensor(np.concatenate(rows), device),
    )


def _joined(arrays: list[IntArray]) -> IntArray:
    joined: IntArray = np.concatenate(arrays, dtype=np.int32, casting="same_kind")
    return joined


def _tensor(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False)).to(device)
