"""The ledger of free slots."""

from __future__ import annotations

import numpy as np
import pytest

from trellis.radix import SlotPool


def test_hands_out_each_slot_once_and_never_slot_zero() -> None:
    pool = SlotPool(6)
    first, second = pool.alloc(4), pool.alloc(2)
    assert first is not None
    assert second is not None
    assert sorted([*first.tolist(), *second.tolist()]) == [1, 2, 3, 4, 5, 6]
    assert first.dtype == np.int32
    assert (pool.free, pool.used) == (0, 6)


def test_alloc_is_all_or_nothing() -> None:
    pool = SlotPool(3)
    assert pool.alloc(4) is None
    assert pool.free == 3
    nothing = pool.alloc(0)
    assert nothing is not None
    assert len(nothing) == 0


def test_released_slots_come_back() -> None:
    pool = SlotPool(3)
    slots = pool.alloc(3)
    assert slots is not None
    pool.release(slots[1:])
    assert pool.free == 2
    again = pool.alloc(2)
    assert again is not None
    assert sorted(again.tolist()) == sorted(slots[1:].tolist())


def test_what_was_handed_out_does_not_change_when_others_are() -> None:
    pool = SlotPool(4)
    first = pool.alloc(2)
    assert first is not None
    kept = first.tolist()
    pool.release(first)
    pool.alloc(4)
    assert first.tolist() == kept


@pytest.mark.parametrize(
    ("slots", "reason"),
    [
        ([1, 3], "slot 3 is already free"),
        ([1, 2, 1], "slot 1 is given twice"),
        ([0], "slot 0 is not of this pool: its slots are 1 to 4"),
        ([1, 5], "slot 5 is not of this pool"),
        ([-1], "slot -1 is not of this pool"),
    ],
)
def test_a_wrong_release_is_refused_and_changes_nothing(slots: list[int], reason: str) -> None:
    pool = SlotPool(4)
    assert pool.alloc(2) is not None  # 1 and 2
    with pytest.raises(ValueError, match=reason):
        pool.release(np.array(slots))
    assert pool.free == 2
    assert pool.in_use().tolist() == [1, 2]
    pool.release(np.array([1, 2]))
    assert pool.free == 4


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        SlotPool(0)
    with pytest.raises(ValueError, match="must not be negative"):
        SlotPool(4).alloc(-1)
