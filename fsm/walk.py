"""Which tokens an automaton allows: its transitions along the vocabulary's trie, one vectorised step a level."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from trellis.fsm.automaton import DEAD, ByteAutomaton
from trellis.fsm.flat_trie import LongArray
from trellis.fsm.trie import TokenTrie

# Levels are computed whole while at least this share of the level above is live; else only what is live.
_DENSE_SHARE = 0.3


class TrieWalk:
    """An automaton on a trie. The automaton's owner holds its lock.

    A whole level costs a few passes over its arrays, which is less than picking out the live nodes as long
    as most are live; so a walk is dense first, and sparse from where it thins out.
    """

    def __init__(self, trie: TokenTrie, automaton: ByteAutomaton) -> None:
        self._trie = trie.nodes
        self._automaton = automaton
        self._labels = automaton.labels(trie.nodes.byte)
        self._holds = trie.token >= 0
        self._above = trie.parent_in_level
        self._levels = list(pairwise(trie.nodes.levels[1:]))

    @property
    def nbytes(self) -> int:
        return self._labels.nbytes + self._holds.nbytes

    def allowed(self, state: int, node: int = 0) -> tuple[LongArray, LongArray]:
        """Nodes below ``node`` whose token is allowed from ``state``, and the state after each."""
        nodes, states = np.array([node]), np.array([state])
        found: list[tuple[LongArray, LongArray]] = []
        if node == 0:
            begin, reached = self._dense(state)
            live = reached != DEAD
            allowed = np.flatnonzero(live & self._holds[: len(live)])
            found.append((allowed, reached[allowed]))
            nodes = np.flatnonzero(live[begin:]) + begin  # the sparse walk goes on from the last level
            states = reached[nodes]
        while len(nodes):
            nodes, states = self._sparse_step(nodes, states)
            holds = self._holds[nodes]
            found.append((nodes[holds], states[holds]))
        return np.concatenate([f[0] for f in found]), np.concatenate([f[1] for f in found])

    def any_allowed(self, state: int, node: int) -> bool:
        """Is any token below ``node`` allowed from ``state``? Stops at the first level with one."""
        nodes, states = np.array([node]), np.array([state])
        while len(nodes):
            nodes, states = self._sparse_step(nodes, states)
            if self._holds[nodes].any():
                return True
        return False

    def _dense(self, state: int) -> tuple[int, LongArray]:
        """Whole levels from the root until they thin out: where the last of them begins, and the states of
        all nodes up to there (int64, 0 where dead; the root, which holds no token, has the start)."""
        states = np.array([state])
        done, last = [states], 0
        for begin, end in self._levels:
            if np.count_nonzero(states) < _DENSE_SHARE * len(states):
                break
            states = self._automaton.advance(states.take(self._above[begin:end]), self._labels[begin:end])
            done.append(states)
            last = begin
        return last, np.concatenate(done)

    def _sparse_step(self, nodes: LongArray, states: LongArray) -> tuple[LongArray, LongArray]:
        """The live children of these nodes and the states there."""
        counts = self._trie.child_count[nodes]
        ends = np.cumsum(counts)
        children = np.repeat(self._trie.first_child[nodes] - (ends - counts), counts) + np.arange(ends[-1])
        reached = self._automaton.advance(np.repeat(states, counts), self._labels[children])
        live = reached != DEAD
        return children[live], reached[live]
