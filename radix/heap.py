"""Eviction orders by a key of one's own: unlocked leaves, lowest key first."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from trellis.radix.eviction import EvictionPolicy
from trellis.radix.tree import UNLISTED, Node

Entry = tuple[float, int, Node]  # key, number of the entry (so that nodes are never compared), node


class HeapPolicy(EvictionPolicy):
    """Unlocked leaves in the order of ``key_of``.

    What comes in order (a new node under ``fifo``) is appended to a queue, which costs the same at any size;
    only the rest goes into a heap, where each step up a large one is a cache miss. The first of both is next.

    A node has at most one entry. An entry is not searched for when its node is locked, gets a child, dies
    or gets a higher key: it is put right when it comes to the top. Entries are at most twice the unlocked
    nodes (and ``SLACK``); beyond that they are sifted, which the events since the last time pay for.
    """

    SLACK = 64

    def __init__(self) -> None:
        super().__init__()
        self._queue: deque[Entry] = deque()  # ascending
        self._heap: list[Entry] = []
        self._filed = 0
        self._members = 0

    @abstractmethod
    def key_of(self, node: Node) -> float:
        """The node's place; may rise, must never fall while the node is in the tree."""

    def add(self, nodes: Sequence[Node]) -> None:
        self._members += len(nodes)
        for node in nodes:
            if not node.children:
                self.expose(node)

    def remove(self, nodes: Sequence[Node]) -> None:
        self._members -= len(nodes)
        if len(self._queue) + len(self._heap) > 2 * self._members + self.SLACK:
            self._sift()

    def touch(self, nodes: Sequence[Node]) -> None:
        """Nothing to do: a key that rose is found when its entry comes to the top."""

    def split(self, upper: Node, lower: Node) -> None:  # noqa: ARG002
        """The upper part is no leaf; the entry of the lower part, if it has one, goes on standing for it."""
        self._members += 1

    def expose(self, node: Node) -> None:
        if node.bucket == UNLISTED:
            node.bucket = 0
            self._file(node)

    def victim(self) -> Node | None:
        while self._queue or self._heap:
            self.visits += 1
            in_heap = not self._queue or bool(self._heap and self._heap[0] < self._queue[0])
            key, _, node = self._heap[0] if in_heap else self._queue[0]
            candidate = _is_candidate(node)
            if candidate and self.key_of(node) <= key:
                return node
            if in_heap:
                heapq.heappop(self._heap)
            else:
                self._queue.popleft()
            if candidate:
                self._file(node)
            else:
                node.bucket = UNLISTED
        return None

    def clear(self) -> None:
        for _, _, node in chain(self._queue, self._heap):
            node.bucket = UNLISTED
        self._queue.clear()
        self._heap.clear()
        self._members = 0

    def faults(self, unlocked: Collection[Node]) -> Iterator[str]:
        entries = {node: key for key, _, node in chain(self._queue, self._heap)}
        count = len(self._queue) + len(self._heap)
        if len(entries) != count:
            yield f"{count} entries of the order are of only {len(entries)} nodes"
        if list(self._queue) != sorted(self._queue):
            yield "the queue of the order is not ascending"
        if self._members != len(unlocked):
            yield f"the policy counts {self._members} unlocked nodes, there are {len(unlocked)}"
        if count > 2 * self._members + self.SLACK:
            yield f"{count} entries of the order for {self._members} unlocked nodes"
        for node in unlocked:
            if node.children:
                continue
            if node not in entries or node.bucket == UNLISTED:
                yield f"unlocked leaf {node} has no entry in the order"
            elif entries[node] > self.key_of(node):
                yield f"{node} is filed under {entries[node]}, after its key {self.key_of(node)}"

    def _file(self, node: Node) -> None:
        self._filed += 1
        entry = (self.key_of(node), self._filed, node)
        if not self._queue or entry > self._queue[-1]:
            self._queue.append(entry)
        else:
            heapq.heappush(self._heap, entry)

    def _sift(self) -> None:
        """Keep only the entries of candidates."""
        for _, _, node in chain(self._queue, self._heap):
            if not _is_candidate(node):
                node.bucket = UNLISTED
        self._queue = deque(entry for entry in self._queue if entry[2].bucket != UNLISTED)
        self._heap = [entry for entry in self._heap if entry[2].bucket != UNLISTED]
        heapq.heapify(self._heap)


def _is_candidate(node: Node) -> bool:
    return node.locks == 0 and not node.children and node.attached
