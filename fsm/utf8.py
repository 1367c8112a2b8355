"""Characters to bytes: classes of characters that a pattern cannot tell apart, and their UTF-8 spellings.

The spellings form one small automaton that every state of the pattern shares: a node for each distinct set
of "what may follow these bytes". Its leaves are classes, not states, so a large set like ``\\w`` costs its
few hundred nodes once and not once a state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trellis.fsm.charset import Ranges

IntArray = npt.NDArray[np.int32]

_BLOCKS = 0x110000 // 64  # characters with all but the last byte of their spelling in common
_NONE = -1


@dataclass(frozen=True)
class Partition:
    """Classes of characters: two characters of a class are in the same sets.

    starts: int64 [runs], first code point of each run of one class. ids: int32 [runs], its class, -1 for
    characters in no set. count: number of classes. members: the classes that make up each set.
    """

    starts: npt.NDArray[np.int64]
    ids: IntArray
    count: int
    members: dict[Ranges, tuple[int, ...]]

    @staticmethod
    def of(sets: Iterable[Ranges]) -> Partition:
        """The coarsest partition in which each set is a union of classes. O(edges of all sets)."""
        distinct = list(dict.fromkeys(sets))
        edges: dict[int, int] = {0: 0}
        for index, ranges in enumerate(distinct):
            for lo, hi in ranges:
                edges[lo] = edges.get(lo, 0) ^ (1 << index)
                edges[hi + 1] = edges.get(hi + 1, 0) ^ (1 << index)
        starts = sorted(code for code in edges if code <= 0x10FFFF)
        class_of: dict[int, int] = {0: _NONE}
        inside = 0
        ids: list[int] = []
        for code in starts:
            inside ^= edges[code]
            ids.append(class_of.setdefault(inside, len(class_of) - 1))
        members = {
            ranges: tuple(cls for inside, cls in class_of.items() if inside >> index & 1)
            for index, ranges in enumerate(distinct)
        }
        return Partition(np.array(starts, np.int64), np.array(ids, np.int32), len(class_of) - 1, members)

    def at(self, codes: npt.NDArray[np.int64]) -> IntArray:
        """Class of each code point."""
        found: IntArray = self.ids[np.searchsorted(self.starts, codes, side="right") - 1]
        return found


class Utf8Tree:
    """The spellings of the classes of a partition, over classes of bytes that they cannot tell apart.

    byte_class: uint8 [256]. columns: number of byte classes.
    leaf: int32 [nodes, columns]: the character class that a byte completes, else ``count`` (a sentinel).
    children: of each node, (columns, node) pairs for bytes that lead on. Node 0 is the start of a character.
    """

    def __init__(self, partition: Partition) -> None:
        self._nodes: dict[bytes, int] = {}
        self._rows: list[IntArray] = []
        self.count = partition.count
        matrix = self._matrix(partition)
        self.byte_class, self.columns, first = _column_classes(matrix)
        matrix = matrix[:, first]
        self.leaf = np.where(matrix >= 0, matrix, self.count).astype(np.int32)
        inner = set(np.flatnonzero((matrix < _NONE).any(axis=1)).tolist())
        self.children = [_children(row) if node in inner else [] for node, row in enumerate(matrix)]
        self._reach(matrix)

    def live(self, targets: IntArray) -> npt.NDArray[np.bool_]:
        """bool [nodes]: does the node lead to a class whose target (int32 [count + 1]) is not 0?"""
        live: npt.NDArray[np.bool_] = np.maximum.reduceat(targets[self._reached], self._offsets) > 0
        return live

    def _node(self, row: IntArray, leaf: bool) -> int:
        """Number of the node with this row of 64 continuation bytes; -1 if nothing follows."""
        key = (b"l" if leaf else b"i") + row.tobytes()
        node = self._nodes.get(key)
        if node is None:
            if not (row != _NONE).any():
                return _NONE
            node = self._nodes[key] = len(self._nodes) + 1
            self._rows.append(row if leaf else np.where(row == _NONE, _NONE, -1 - row).astype(np.int32))
        return node

    def _matrix(self, partition: Partition) -> IntArray:
        """int32 [nodes, 256]: class >= 0, -1 nothing, -1 - node for a node."""
        blocks = self._blocks(partition)
        thirds = np.array([self._node(row, leaf=False) for row in blocks.reshape(-1, 64)], np.int32)
        # Overlong spellings are not UTF-8: E0 needs A0.., F0 needs 90.., and F4 ends at 8F.
        thirds[0] = self._node(np.where(np.arange(64) < 32, _NONE, blocks[:64]).astype(np.int32), leaf=False)
        fourths = np.full(5 * 64, _NONE, np.int32)
        fourths[16:272] = thirds[16:]
        leads = np.full(256, _NONE, np.int32)
        leads[0xC2:0xE0] = blocks[2:32]
        leads[0xE0:0xF0] = thirds[:16]
        leads[0xF0:0xF5] = [self._node(row, leaf=False) for row in fourths.reshape(5, 64)]
        matrix = np.full((len(self._rows) + 1, 256), _NONE, np.int32)
        matrix[0] = np.where(leads == _NONE, _NONE, -1 - leads)
        matrix[0, :0x80] = partition.at(np.arange(0x80))
        for node, row in enumerate(self._rows, 1):
            matrix[node, 0x80:0xC0] = row
        return matrix

    def _blocks(self, partition: Partition) -> IntArray:
        """int32 [_BLOCKS]: the node of each block of 64 code points."""
        at_start = partition.at(np.arange(_BLOCKS) * 64)
        uniform = [self._node(np.full(64, cls, np.int32), leaf=True) for cls in range(partition.count)]
        blocks: IntArray = np.array([*uniform, _NONE], np.int32)[at_start]
        mixed = np.unique(partition.starts[partition.starts % 64 != 0] // 64)
        rows = partition.at(mixed[:, None] * 64 + np.arange(64))
        for block, row in zip(mixed.tolist(), rows, strict=True):
            blocks[block] = self._node(row, leaf=True)
        return blocks

    def _reach(self, matrix: IntArray) -> None:
        """The classes that each node leads to, as one flat array with offsets (for ``live``)."""
        reached: list[set[int]] = [set() for _ in matrix]
        # A node is numbered after the nodes it leads to, and the start (0) leads to all others.
        for node in [*range(1, len(matrix)), 0]:
            row = matrix[node]
            reached[node].update(row[row >= 0].tolist())
            for _, child in self.children[node]:
                reached[node] |= reached[child]
        lists = [sorted(classes) or [self.count] for classes in reached]
        self._reached = np.array([cls for classes in lists for cls in classes], np.int64)
        self._offsets = np.cumsum([0, *(len(classes) for classes in lists[:-1])])


def _column_classes(matrix: IntArray) -> tuple[npt.NDArray[np.uint8], int, list[int]]:
    """Class of each column, number of classes, and one column of each class."""
    seen: dict[bytes, int] = {}
    first: list[int] = []
    ids = np.zeros(matrix.shape[1], np.uint8)
    for index, column in enumerate(np.ascontiguousarray(matrix.T)):
        key = column.tobytes()
        if key not in seen:
            seen[key] = len(seen)
            first.append(index)
        ids[index] = seen[key]
    return ids, len(seen), first


def _children(row: IntArray) -> list[tuple[npt.NDArray[np.int64], int]]:
    columns = np.flatnonzero(row < _NONE)
    nodes = -1 - row[columns]
    return [(columns[nodes == node], int(node)) for node in np.unique(nodes)]
