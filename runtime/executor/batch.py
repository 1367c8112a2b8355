"""The tensors of one step: the extends of all requests, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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


@dataclass(frozen=True)
class Batch:
    """The same as tensors on the device. B: extends, T: tokens, R: rows of logits, S: slots of all extends.

    flat: what it was made of, on the host, so that nothing has to be read back. token_ids, positions, write_slots: int64 [T].
    logits_rows: int64 [R], the packed tokens whose logits are wanted.
    query_starts, slot_starts: int32 [B + 1], where the tokens and the slots of each extend begin, and at last where they end.
    slots: int32 [S].
    """

    flat: FlatBatch
    token_ids: Tensor
    positions: Tensor
    write_slots: Tensor
    logits_rows: Tensor
    query_starts: Tensor
    slot_starts: Tensor
    slots: Tensor

    def __len__(self) -> int:
        return len(self.flat.lengths)

    @cached_property
    def extents(self) -> tuple[Extent, ...]:
        """One an extend, in order: for backends that take the extends one by one."""
        slots, extents, offset, first = self.slots.long(), [], 0, 0
        for length, start in zip(self.flat.lengths.tolist(), self.flat.starts.tolist(), strict=True):
            extents.append(Extent(offset, length, start, slots[first : first + start + length]))
            offset += length
            first += start + length
        return tuple(extents)


class Arrays(NamedTuple):
    """The tensors of a ``Batch`` as int32 arrays on the host, in their order there."""

    token_ids: IntArray
    positions: IntArray
    write_slots: IntArray
    logits_rows: IntArray
    query_starts: IntArray
    slot_starts: IntArray
    slots: IntArray


WIDE = 4  # so many of them, from the first, are int64 in a batch, as torch indexes with


def arrange(flat: FlatBatch) -> Arrays:
    """Vectorised: O(T + S) in numpy, nothing an extend in Python."""
    query_starts = _starts(flat.lengths)
    slot_starts = _starts(flat.starts + flat.lengths)
    place = np.arange(len(flat.token_ids), dtype=np.int32)
    within = place - np.repeat(query_starts[:-1], flat.lengths)
    last = np.repeat(
        slot_starts[1:] - query_starts[1:], flat.lengths
    )  # the tokens' slots are the last of each extend's
    return Arrays(
        token_ids=flat.token_ids,
        positions=within + np.repeat(flat.starts, flat.lengths),
        write_slots=flat.slots[place + last],
        logits_rows=np.flatnonzero(within >= np.repeat(flat.logits_from, flat.lengths)).astype(np.int32),
        query_starts=query_starts,
        slot_starts=slot_starts,
        slots=flat.slots,
    )


def pack(extends: Sequence[Extend], device: torch.device) -> Batch:
    """Extends as tensors, copied one by one. Raises as ``flatten`` does. (``runtime/cuda/staging.py`` copies all at once.)"""
    flat = flatten(extends)
    parts = arrange(flat)
    wide = [torch.from_numpy(part.astype(np.int64)).to(device) for part in parts[:WIDE]]
    narrow = [torch.from_numpy(part).to(device) for part in parts[WIDE:]]
    return Batch(flat, *wide, *narrow)


def _starts(lengths: IntArray) -> IntArray:
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _joined(arrays: list[IntArray]) -> IntArray:
    joined: IntArray = np.concatenate(arrays, dtype=np.int32, casting="same_kind")
    return joined
