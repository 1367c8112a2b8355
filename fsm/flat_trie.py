"""A trie of byte strings laid flat in numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LongArray = npt.NDArray[np.int64]


class FlatTrie:
    """Nodes are numbered breadth first, and by byte below one parent; node 0 is the empty string.

    So the children of a node are contiguous and sorted, and a level is a range of nodes.
    byte: uint8 [nodes]. parent, first_child, child_count: int64 [nodes]; the root's parent is -1.
    levels: the nodes of length n are levels[n] .. levels[n + 1]. ends: int64 [words], node of each word.
    """

    def __init__(self, words: Sequence[bytes]) -> None:
        """words: sorted. One pass a level over the words that are at least that long: O(bytes of all words)."""
        flat = np.array(bytearray(b"".join(words)), np.uint8)
        lengths = np.array([len(word) for word in words], np.int64)
        offsets = np.cumsum(lengths) - lengths
        self.ends: LongArray = np.zeros(len(words), np.int64)  # while building: of each word's prefix so far
        self.levels = [0, 1]
        byte, parent = [np.zeros(1, np.uint8)], [np.full(1, -1, np.int64)]
        while (alive := np.flatnonzero(lengths >= len(self.levels) - 1)).size:
            here, above = flat[offsets[alive] + len(self.levels) - 2], self.ends[alive]
            new = np.ones(len(alive), np.bool_)
            new[1:] = (here[1:] != here[:-1]) | (above[1:] != above[:-1])
            self.ends[alive] = self.levels[-1] - 1 + np.cumsum(new)
            byte.append(here[new])
            parent.append(above[new])
            self.levels.append(self.levels[-1] + int(new.sum()))
        self.byte: npt.NDArray[np.uint8] = np.concatenate(byte)
        self.parent: LongArray = np.concatenate(parent)
        self.child_count: LongArray = np.bincount(self.parent[1:], minlength=len(self.byte))
        self.first_child: LongArray = np.cumsum(self.child_count) - self.child_count + 1
        self._text = self.byte.tobytes()

    def __len__(self) -> int:
        return len(self.byte)

    @property
    def depth(self) -> int:
        """Bytes of the longest word."""
        return len(self.levels) - 2

    @property
    def nbytes(self) -> int:
        arrays = (self.byte, self.parent, self.child_count, self.first_child, self.ends)
        return sum(array.nbytes for array in arrays) + len(self._text)

    def find(self, data: bytes, node: int = 0) -> int:
        """The node of these bytes below ``node``, or -1."""
        for value in data:
            first = int(self.first_child[node])
            node = self._text.find(value, first, first + int(self.child_count[node]))
            if node < 0:
                break
        return node
