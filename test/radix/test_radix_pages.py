"""The ledger of free slots in whole pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis.radix import PagePool, SlotPool, make_pool


@given(
    page=st.sampled_from([1, 2, 4, 16]),
    pages=st.integers(1, 9),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30),
)
def test_every_page_has_one_owner_and_comes_back(
    page: int, pages: int, moves: list[tuple[bool, int]]
) -> None:
    pool = PagePool(page * pages, page)
    held: list[np.ndarray] = []
    for takes, n in moves:
        if takes:
            slots = pool.alloc(n * page)
            assert (slots is None) == (n * page > pool.size - sum(map(len, held)))
            if slots is not None:
                assert (slots % page == np.arange(len(slots)) % page).all(), "a page's slots stand in order"
                assert (slots // page == np.repeat(slots[::page] // page, page)).all(), "and together"
                held.append(slots)
        elif held:
            pool.release(held.pop(n % len(held)))
        owned = sorted(slot for slots in held for slot in slots.tolist())
        assert pool.in_use().tolist() == owned
        assert len(set(owned)) == len(owned) == pool.used == pool.size - pool.free
        assert all(page <= slot < pool.size + page for slot in owned), "page 0 is the sink's"


@pytest.mark.parametrize(
    ("slots", "reason"),
    [
        ([4, 5, 6], "not whole pages of 4"),
        ([5, 4, 6, 7], "not whole pages of 4"),
        ([4, 5, 10, 11], "not whole pages of 4"),
        ([0, 1, 2, 3], "slot 0 is not of this pool"),
        ([16, 17, 18, 19], "slot 4 is not of this pool"),
        ([12, 13, 14, 15], "slot 3 is already free"),
        ([4, 5, 6, 7, 4, 5, 6, 7], "slot 1 is given twice"),
    ],
)
def test_a_wrong_release_is_refused_and_changes_nothing(slots: list[int], reason: str) -> None:
    pool = PagePool(12, 4)
    assert pool.alloc(8) is not None  # pages 1 and 2
    with pytest.raises(ValueError, match=reason):
        pool.release(np.array(slots))
    assert (pool.free, pool.used) == (4, 8)
    pool.release(np.arange(4, 12))
    assert pool.free == 12


def test_sizes_that_make_no_sense_are_refused() -> None:
    for size, page in ((0, 4), (6, 4), (3, 4), (4, 0)):
        with pytest.raises(ValueError, match="whole pages"):
            PagePool(size, page)
    with pytest.raises(ValueError, match="cannot allocate 3 slots"):
        PagePool(8, 4).alloc(3)
    with pytest.raises(ValueError, match="must not be negative"):
        PagePool(8, 4).alloc(-4)


def test_pages_of_one_slot_are_slots() -> None:
    assert isinstance(make_pool(7, 1), SlotPool)
    assert isinstance(make_pool(8, 4), PagePool)
