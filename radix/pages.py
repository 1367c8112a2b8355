"""The ledger of free slots where they are handed out in pages."""

from __future__ import annotations

import numpy as np

from trellis.radix.pool import SlotPool
from trellis.radix.tree import IntArray


class PagePool:
    """As ``SlotPool``, in whole pages: page p has the slots p * page_size and on. Page 0 is the padding sink's: it is never
    handed out, so the slots are page_size .. size + page_size - 1.

    size: slots, whole pages of them. Every operation costs O(slots moved), vectorised.
    """

    def __init__(self, size: int, page_size: int) -> None:
        if page_size < 1 or size < page_size or size % page_size:
            raise ValueError(f"a page pool needs whole pages, got size={size} with pages of {page_size}")
        self.size = size
        self.page_size = page_size
        self._pages = SlotPool(size // page_size)
        self._within: IntArray = np.arange(page_size, dtype=np.int32)

    @property
    def free(self) -> int:
        """Slots that can be handed out now: whole pages."""
        return self._pages.free * self.page_size

    @property
    def used(self) -> int:
        """Slots that are handed out."""
        return self.size - self.free

    def alloc(self, n: int) -> IntArray | None:
        """int32 [n] slots, page after page, or None when fewer than n are free: all or nothing.

        Raises ValueError for an n that is negative or not whole pages.
        """
        if n % self.page_size:
            raise ValueError(f"cannot allocate {n} slots: they are handed out in pages of {self.page_size}")
        pages = self._pages.alloc(n // self.page_size)
        return None if pages is None else self._slots_of(pages)

    def release(self, slots: IntArray) -> None:
        """Take back whole pages (int; the slots of each page together and in order, each page once).

        Raises ValueError, with the ledger as it was, if one is not whole, not of this pool, already free or given twice.
        """
        slots = np.asarray(slots, dtype=np.int32)
        pages = slots[:: self.page_size] // self.page_size
        if len(slots) % self.page_size or not np.array_equal(self._slots_of(pages), slots):
            raise ValueError(
                f"cannot take back {len(slots)} slots that are not whole pages of {self.page_size}"
            )
        try:
            self._pages.release(pages)
        except ValueError as error:
            raise ValueError(f"in pages of {self.page_size} slots: {error}") from None

    def in_use(self) -> IntArray:
        """int32; the ids of all slots that are handed out, ascending. For checks and debugging."""
        return self._slots_of(self._pages.in_use())

    def _slots_of(self, pages: IntArray) -> IntArray:
        slots: IntArray = (pages[:, None] * np.int32(self.page_size) + self._within).reshape(-1)
        return slots


def make_pool(size: int, page_size: int) -> SlotPool | PagePool:
    """The ledger of a pool whose slots are handed out in such pages. Pages of one slot need none of this."""
    return SlotPool(size) if page_size == 1 else PagePool(size, page_size)
