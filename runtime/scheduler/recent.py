"""Sequences that ended a moment ago: what a program that goes on with them would find in the cache.

A program makes one call after another, each with what came before it as the prompt. Between two calls, a step or
the time of a tool, nobody holds what the first one left. If a cold request is admitted in that moment, it takes just
these tokens, since all that is older may be locked; the next call computes them again and takes another one's. So
admission counts them as held for a short time, and lets a cold request wait for that.

Whether it is worth it shows in what happens: ``share`` is a moving average of how many ended sequences were gone on
with in time. Where hardly any is (every request stands alone), nothing is held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from trellis.radix import Node

KEEP_STEPS = 4  # at least; the next call of a program needs a step or two to come
MOST = 256  # sequences
RATE = 1 / 8  # of the moving average: about the last dozen sequences count
WORTH = 0.2  # the least share of continued sequences to hold any


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence ends at ``node``, an edge of ``length`` tokens below ``parent``, matched ``hits`` times before."""

    node: Node
    parent: Node | None
    length: int
    hits: int
    at: float
    step: int

    def continued(self) -> bool:
        """Has a request matched it since to the end, or, cutting the edge, the larger part of it?"""
        node, above = self.node, self.node.parent
        if node.hits > self.hits:
            return True
        cut = above is not self.parent and above is not None and above.hits > self.hits
        return cut and 2 * node.length <= self.length

    def reaches(self, node: Node) -> bool:
        """Does what ends at this node go on with the sequence: to the end or, where the edge was cut, its larger part?"""
        cut = node is self.node.parent and node is not self.parent
        return node is self.node or (cut and 2 * self.node.length <= self.length)


class Recent:
    """keep_s: for how long a sequence counts as held after its end, in seconds (and ``KEEP_STEPS`` steps)."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._ended: deque[Ended] = deque()
        self._ends: deque[Ended] = deque(maxlen=MOST)
        self._step = 0
        self.share = 1.0

    @property
    def worth_it(self) -> bool:
        """Are sequences gone on with often enough to hold them?"""
        return self._keep_s > 0 and self.share >= WORTH

    @property
    def turns_to_come(self) -> float:
        """How often a sequence will be gone on with, if each time is as likely as the last: share / (1 - share)."""
        return self.share / max(1e-9, 1.0 - self.share) if self.worth_it else 0.0

    def step(self) -> None:
        """A step begins."""
        self._step += 1

    def add(self, node: Node, now: float) -> None:
        """A request ended here."""
        ended = Ended(node, node.parent, node.length, node.hits, now, self._step)
        self._ends.append(ended)
        self._ended.append(ended)
        if len(self._ended) > MOST:
            self._ended.popleft()

    def goes_on(self, node: Node | None) -> bool:
        """Does a request whose match ends at this node go on with one of the last ``MOST`` sequences that ended? If not
        it begins something new, however much it has found: programs of one kind share their template. False where
        holding is not worth it, as nobody asks then. O(``MOST``)."""
        return self.worth_it and node is not None and any(ended.reaches(node) for ended in self._ends)

    def held(self, now: float, wanted: Iterable[Node]) -> int:
        """Tokens of such sequences, and up to the wanted nodes, that nobody holds now; each counted once.
        O(sequences and unlocked nodes)."""
        waiting: deque[Ended] = deque()
        for ended in self._ended:
            if ended.continued():
                self.share += (1.0 - self.share) * RATE
            elif now - ended.at >= self._keep_s and self._step - ended.step >= KEEP_STEPS:
                self.share -= self.share * RATE
            elif ended.node.attached:
                waiting.append(ended)
        self._ended = waiting
        recent = [ended.node for ended in waiting] if self.worth_it else []
        tokens = 0
        seen: set[Node] = set()
        for start in (*recent, *wanted):
            node: Node | None = start
            while node is not None and not node.locks and node not in seen:
                seen.add(node)
                tokens += node.length
                node = node.parent
        return tokens
