"""A growable int32 array: the tokens and the slots of one request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


class IntBuffer:
    """int32 [len]; appending is amortised O(1), reading never copies."""

    __slots__ = ("_data", "_length")

    def __init__(self, values: npt.ArrayLike = ()) -> None:
        self._data: IntArray = np.array(values, dtype=np.int32)
        self._length = len(self._data)

    def __len__(self) -> int:
        return self._length

    def view(self, start: int = 0, stop: int | None = None) -> IntArray:
        """The values in [start, stop) without a copy; valid until the next change."""
        length = self._length
        return self._data[start : length if stop is None or stop > length else stop]

    def at(self, index: int) -> int:
        """The value there, which must exist."""
        return self._data.item(index)

    def append(self, value: int) -> None:
        at = self._length
        if at == len(self._data):
            self._grow(1)
        self._data[at] = value
        self._length = at + 1

    def extend(self, values: IntArray) -> None:
        at, after = self._length, self._length + len(values)
        if after > len(self._data):
            self._grow(len(values))
        self._data[at:after] = values
        self._length = after

    def write(self, start: int, values: IntArray) -> None:
        """Replace the values at start .. start+len(values)-1, which must exist."""
        self._data[start : start + len(values)] = values

    def truncate(self, length: int) -> None:
        """Keep the first length values."""
        self._length = min(self._length, length)

    def _grow(self, n: int) -> None:
        grown: IntArray = np.empty(max(self._length + n, 2 * len(self._data), 16), dtype=np.int32)
        grown[: self._length] = self._data[: self._length]
        self._data = grown
