"""What rank 0 tells the others: the extends of a step, as few bytes as can be.

All slots of a sequence are 4 bytes a token, a megabyte a step with 64 requests of 4,000 tokens. Nearly all of them stood in
the step before, so only what is new is sent: both sides keep the slots of the last step.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from trellis.runtime.executor.batch import flatten
from trellis.runtime.executor.contract import Extend, IntArray

NOWHERE = -1


class Step(msgspec.Struct, tag="step"):
    """int32 arrays as bytes. table: [extends, 5], for each its length, start, the first of its tokens whose logits are
    wanted, the place that it follows, and which extend of the last step has its first ``start`` slots (NOWHERE: none).
    token_ids: of all extends. slots: of all extends, without those that the last step has."""

    table: bytes
    token_ids: bytes
    slots: bytes


class Rows(msgspec.Struct, tag="rows"):
    """Logits are wanted of these rows of a step whose logits were too many to compute at once. step: how many steps had been
    sent by then; it is the last one."""

    step: int
    rows: list[int]


class Meet(msgspec.Struct, tag="meet"):
    """A sign of life is wanted."""


class End(msgspec.Struct, tag="end"):
    """The group is being left, by all at the same time: NCCL wants it so."""


Message = Step | Rows | Meet | End


class StepEncoder:
    """Rank 0's side. Steps are decoded in the order in which they were encoded."""

    def __init__(self) -> None:
        self._last: list[IntArray] = []

    def encode(self, extends: Sequence[Extend]) -> Step:
        """Raises ValueError as ``flatten`` does."""
        flat = flatten(extends)
        by_end = {int(slots[-1]): index for index, slots in enumerate(self._last)}
        before: list[int] = []
        new: list[IntArray] = []
        for index, extend in enumerate(extends):
            elsewhere = by_end.get(int(extend.slots[extend.start - 1]), NOWHERE)
            found = self._find(extend, (index, elsewhere)) if extend.start else NOWHERE
            before.append(found)
            new.append(extend.slots if found == NOWHERE else extend.slots[extend.start :])
        # Copies, as the scheduler goes on to change its own.
        self._last = [extend.slots.astype(np.int32) for extend in extends]
        known = np.array([extend.follows for extend in extends], np.int32), np.array(before, np.int32)
        table = np.stack([flat.lengths, flat.starts, flat.logits_from, *known], axis=1)
        return Step(table.tobytes(), flat.token_ids.tobytes(), np.concatenate(new, dtype=np.int32).tobytes())

    def _find(self, extend: Extend, candidates: tuple[int, ...]) -> int:
        """Extends mostly stand where they stood; else the one that ended where this one goes on is looked for."""
        known = extend.slots[: extend.start]
        for index in candidates:
            if 0 <= index < len(self._last) and np.array_equal(self._last[index][: extend.start], known):
                return index
        return NOWHERE


class StepDecoder:
    """The side of the others."""

    def __init__(self) -> None:
        self._last: list[IntArray] = []

    def decode(self, step: Step) -> list[Extend]:
        table = np.frombuffer(step.table, np.int32).reshape(-1, 5)
        token_ids, slots = (np.frombuffer(each, np.int32) for each in (step.token_ids, step.slots))
        extends: list[Extend] = []
        token_at = slot_at = 0
        for length, start, logits_from, follows, before in table.tolist():
            own = slots[slot_at : slot_at + length + (start if before == NOWHERE else 0)]
            slot_at += len(own)
            whole = own if before == NOWHERE else np.concatenate([self._last[before][:start], own])
            extends.append(
                Extend(token_ids[token_at : token_at + length], start, whole, logits_from, follows)
            )
            token_at += length
        self._last = [extend.slots for extend in extends]
        return extends
