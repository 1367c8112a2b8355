"""The tensors of one step: the extends of all requests, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trellis.runtime.executor.contract import Extend


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


def pack(extends: Sequence[Extend], device: torch.device) -> Batch:
    """Flatten extends into one batch. ValueError if there is none, or one contradicts itself."""
    if not extends:
        raise ValueError("a batch needs at least one extend")
    extents, rows, offset = [], [], 0
    for index, extend in enumerate(extends):
        length = len(extend.token_ids)
        if length < 1 or len(extend.slots) != extend.start + length or not 0 <= extend.logits_from <= length:
            raise ValueError(
                f"extend {index}: {length} tokens from position {extend.start} with {len(extend.slots)} slots "
                f"and logits from {extend.logits_from} do not fit together"
            )
        slots = torch.from_numpy(extend.slots.astype(np.int64)).to(device)
        extents.append(Extent(offset, length, extend.start, slots))
        rows.append(np.arange(offset + extend.logits_from, offset + length))
        offset += length
    lengths = [extent.length for extent in extents]
    starts = [extent.start - extent.offset for extent in extents]
    return Batch(
        token_ids=_tensor(np.concatenate([e.token_ids for e in extends]), device),
        positions=_tensor(np.arange(offset) + np.repeat(starts, lengths), device),
        write_slots=torch.cat([extent.slots[extent.start :] for extent in extents]),
        extents=tuple(extents),
        logits_rows=_tensor(np.concatenate(rows), device),
    )


def _tensor(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False)).to(device)
