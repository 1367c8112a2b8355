"""The ledger of free slots: which rows of the K/V pool belong to nobody."""

from __future__ import annotations

import numpy as np

from trellis.radix.tree import IntArray


class SlotPool:
    """Hands out slot ids 1 .. size. Slot 0 is the padding sink: it is never handed out.

    Ids are kept on a stack, so recently released slots are used again first; a bitmap of the slots in use
    catches a release of what is already free. Every operation costs O(slots moved), vectorised.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a slot pool needs at least one slot, got size={size}")
        self.size = size
        self._stack: IntArray = np.arange(size, 0, -1, dtype=np.int32)  # the top is the end
        self._free = size
        self._used = np.zeros(size + 1, np.bool_)
        self._seen = np.zeros(size + 1, np.int32)  # scratch, to find duplicates in one release

    @property
    def free(self) -> int:
        """Slots that can be handed out now."""
        return self._free

    @property
    def used(self) -> int:
        """Slots that are handed out."""
        return self.size - self._free

    def alloc(self, n: int) -> IntArray | None:
        """int32 [n] slots, or None when fewer than n are free: all or nothing.

        Raises ValueError for a negative n.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} slots: the number must not be negative")
        if n > self._free:
            return None
        rest = self._free - n
        slots: IntArray = self._stack[rest : self._free][::-1].copy()
        self._free = rest
        self._used[slots] = True
        return slots

    def release(self, slots: IntArray) -> None:
        """Take back slots (int, any length, each once).

        Raises ValueError, with the ledger as it was, if one is out of range, already free or given twice.
        """
        slots = np.asarray(slots, dtype=np.int32)
        n = len(slots)
        if n == 0:
            return
        if int(slots.min()) < 1 or int(slots.max()) > self.size:
            wrong = slots[(slots < 1) | (slots > self.size)][0]
            raise ValueError(f"slot {wrong} is not of this pool: its slots are 1 to {self.size}")
        used = self._used[slots]
        if not used.all():
            raise ValueError(f"slot {slots[~used][0]} is already free: it was released before")
        order = np.arange(n, dtype=np.int32)
        self._seen[slots] = order
        twice = self._seen[slots] != order
        if twice.any():
            raise ValueError(f"slot {slots[twice][0]} is given twice in one release")
        self._used[slots] = False
        self._stack[self._free : self._free + n] = slots[::-1]
        self._free += n

    def in_use(self) -> IntArray:
        """int32; the ids of all slots that are handed out, ascending. For checks and debugging."""
        return np.flatnonzero(self._used).astype(np.int32)
