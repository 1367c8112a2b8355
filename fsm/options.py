"""The byte automaton of a list of options: their trie, built at once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from trellis.fsm.automaton import DEAD
from trellis.fsm.flat_trie import FlatTrie, LongArray


class OptionsAutomaton:
    """A ``ByteAutomaton`` for exactly one out of a non-empty list of options in UTF-8.

    State n + 1 is node n of the trie. A transition is looked up among the sorted (parent, byte) pairs of
    all nodes, so there is no table of states by bytes to fill.
    """

    def __init__(self, options: Iterable[str]) -> None:
        self._trie = FlatTrie(sorted({option.encode() for option in options}))
        self._edges: LongArray = self._trie.parent[1:] << 8 | self._trie.byte[1:]  # of node 1, 2, ...
        self._accepting = np.zeros(len(self._trie), np.bool_)
        self._accepting[self._trie.ends] = True

    def __len__(self) -> int:
        return len(self._trie) + 1

    @property
    def nbytes(self) -> int:
        return self._trie.nbytes + self._edges.nbytes + self._accepting.nbytes

    def accepting(self, state: int) -> bool:
        return bool(self._accepting[state - 1])

    def ends(self, state: int) -> bool:
        return not self._trie.child_count[state - 1]

    def live_bytes(self, state: int) -> list[int]:
        first, count = int(self._trie.first_child[state - 1]), int(self._trie.child_count[state - 1])
        live: list[int] = self._trie.byte[first : first + count].tolist()
        return live

    def only_byte(self, state: int) -> int:
        if self._accepting[state - 1] or self._trie.child_count[state - 1] != 1:
            return -1
        return int(self._trie.byte[self._trie.first_child[state - 1]])

    def inside_character(self, state: int) -> bool:
        return any(byte & 0xC0 == 0x80 for byte in self.live_bytes(state)[:1])

    def step(self, state: int, data: bytes) -> int:
        return self._trie.find(data, state - 1) + 1 if state != DEAD else DEAD

    def labels(self, data: npt.NDArray[np.uint8]) -> LongArray:
        return data.astype(np.int64)

    def advance(self, states: LongArray, labels: LongArray) -> LongArray:
        wanted = (states - 1) << 8 | labels  # negative, so not found, where dead
        at = np.minimum(np.searchsorted(self._edges, wanted), len(self._edges) - 1)
        return np.where(self._edges[at] == wanted, at + 2, DEAD)

    def within(self, state: int, _horizon: int) -> int:
        return state  # options have no counters

    def signature(self, state: int) -> bytes:
        return state.to_bytes(8, "little")
