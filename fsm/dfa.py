"""A deterministic byte automaton that is built while it is used."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trellis.fsm.automaton import DEAD
from trellis.fsm.flat_trie import LongArray
from trellis.fsm.limits import Budget

IntArray = npt.NDArray[np.int32]

# Python objects of a state besides its row: key, dictionary entries, list cells.
_STATE_OVERHEAD = 400
_FIRST_ROWS = 16


class Source(Protocol):
    """Where the states come from. Every key that it hands out can still reach acceptance.

    byte_class: uint8 [256]; bytes of one class are not told apart. columns: number of byte classes.
    """

    byte_class: npt.NDArray[np.uint8]
    columns: int

    def start(self) -> Hashable:
        """Key of the first state."""

    def expand(self, key: Hashable, intern: Callable[[Hashable], int]) -> tuple[IntArray, bool]:
        """Row of next states (int32 [columns], 0 where there is none) and whether the state accepts."""

    def within(self, key: Hashable, horizon: int, intern: Callable[[Hashable], int]) -> Hashable:
        """Key of a state that behaves the same for the next ``horizon`` bytes; may be the key itself."""

    def inside_character(self, key: Hashable) -> bool:
        """Are some, but not all, bytes of a character read?"""


class LazyDfa:
    """A ``ByteAutomaton``: numbers the states of a source and keeps their rows in one table.

    A state is made when a row names it and gets its own row (is expanded) when somebody steps on from it.
    """

    def __init__(self, source: Source, budget: Budget) -> None:
        self._source = source
        self._budget = budget
        self._columns = source.columns
        self._byte_class: list[int] = source.byte_class.tolist()
        # The byte of each class, or -1 for a class of several.
        counts = np.bincount(source.byte_class, minlength=source.columns)
        self._sole_byte = [
            self._byte_class.index(column) if count == 1 else -1 for column, count in enumerate(counts)
        ]
        self._ids: dict[Hashable, int] = {}
        self._keys: list[Hashable] = [None]
        self._table = np.zeros((_FIRST_ROWS, source.columns), np.int32)
        self._expanded = np.zeros(_FIRST_ROWS, np.bool_)
        self._expanded[DEAD] = True
        self._unexpanded = 0
        self._accepting = [False]
        self._live: list[int] = [0]  # number of byte classes that lead on
        self._intern(source.start())

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def nbytes(self) -> int:
        return self._budget.memory

    def _intern(self, key: Hashable) -> int:
        state = self._ids.get(key)
        if state is None:
            self._budget.state(self._columns * self._table.itemsize + _STATE_OVERHEAD)
            state = len(self._keys)
            if state == len(self._expanded):
                self._grow()
            self._ids[key] = state
            self._keys.append(key)
            self._accepting.append(False)
            self._live.append(0)
            self._unexpanded += 1
        return state

    def _grow(self) -> None:
        rows = len(self._expanded) // 2
        self._table = np.concatenate([self._table, np.zeros((rows, self._columns), np.int32)])
        self._expanded = np.concatenate([self._expanded, np.zeros(rows, np.bool_)])

    def _expand(self, state: int) -> None:
        if self._expanded[state]:
            return
        row, accepting = self._source.expand(self._keys[state], self._intern)
        self._table[state] = row
        self._accepting[state] = accepting
        self._live[state] = int(np.count_nonzero(row))
        self._expanded[state] = True
        self._unexpanded -= 1

    def accepting(self, state: int) -> bool:
        self._expand(state)
        return self._accepting[state]

    def ends(self, state: int) -> bool:
        self._expand(state)
        return self._live[state] == 0

    def live_bytes(self, state: int) -> list[int]:
        self._expand(state)
        row = self._table[state].tolist()
        return [byte for byte, column in enumerate(self._byte_class) if row[column]]

    def only_byte(self, state: int) -> int:
        if self.accepting(state) or self._live[state] != 1:
            return -1
        return self._sole_byte[int(self._table[state].argmax())]

    def inside_character(self, state: int) -> bool:
        return self._source.inside_character(self._keys[state])

    def step(self, state: int, data: bytes) -> int:
        for byte in data:
            if not self._expanded[state]:
                self._expand(state)
            state = int(self._table[state, self._byte_class[byte]])
            if state == DEAD:
                break
        return state

    def labels(self, data: npt.NDArray[np.uint8]) -> LongArray:
        return np.array(self._byte_class, np.int64)[data]

    def advance(self, states: LongArray, labels: LongArray) -> LongArray:
        if self._unexpanded:
            expanded = self._expanded.take(states)
            if not expanded.all():
                for state in np.unique(states[~expanded]).tolist():
                    self._expand(state)
        cells = states * self._columns
        cells += labels
        return self._table.reshape(-1).take(cells).astype(np.int64)

    def within(self, state: int, horizon: int) -> int:
        key = self._keys[state]
        bounded = self._source.within(key, horizon, self._intern)
        return state if bounded == key else self._intern(bounded)

    def signature(self, state: int) -> bytes:
        self._expand(state)
        return bytes([self._accepting[state], *self._table[state].tobytes()])
