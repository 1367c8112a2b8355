"""Eviction orders by use: doubly linked lists through the nodes, oldest first.

They hold all unlocked nodes, inner ones too, and stay right with work in proportion to the path that was
used, because a use refreshes a whole path, deepest node first: an ancestor is always in a later place than
its descendants. Hence the first node of the first list has no unlocked child; and it has no locked one, since
a lock counts on all ancestors. It is a leaf. No entry is ever stale, no operation is ever long.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence

from trellis.radix.eviction import EvictionPolicy
from trellis.radix.tree import UNLISTED, Node


class Bucket:
    """A circular list of nodes through ``prev`` and ``next``; ``end`` is a node that stands for its ends.

    A run is a piece of a list, from ``first`` to ``last``, of ``count`` nodes.
    """

    __slots__ = ("count", "end")

    def __init__(self) -> None:
        self.end = Node(0, b"", b"", None, 0)
        self.end.prev = self.end.next = self.end
        self.count = 0

    @property
    def oldest(self) -> Node:
        """Of a bucket that is not empty."""
        assert self.end.next is not None
        return self.end.next

    def __iter__(self) -> Iterator[Node]:
        node = self.end.next
        while node is not None and node is not self.end:
            yield node
            node = node.next

    def append(self, first: Node, last: Node, count: int) -> None:
        """Put a run, linked inside, at the young end."""
        assert self.end.prev is not None
        self.link(first, last, count, after=self.end.prev)

    def link(self, first: Node, last: Node, count: int, after: Node) -> None:
        following = after.next
        assert following is not None
        first.prev = after
        last.next = following
        after.next = first
        following.prev = last
        self.count += count

    def unlink(self, first: Node, last: Node, count: int) -> None:
        """Take a run out; inside it stays linked."""
        before, following = first.prev, last.next
        assert before is not None
        assert following is not None
        before.next = following
        following.prev = before
        first.prev = last.next = None
        self.count -= count

    def close(self) -> None:
        """An empty list is a cycle of one node, which no count of references would ever free."""
        self.end.prev = self.end.next = None


class ListPolicy(EvictionPolicy):
    """Unlocked nodes in buckets; the lowest bucket goes first, in it the least recently used."""

    SLACK = 64

    def __init__(self) -> None:
        super().__init__()
        self._buckets: dict[int, Bucket] = {}  # none is empty
        self._numbers: list[int] = []  # a heap; has the keys of _buckets, and others that are gone

    @abstractmethod
    def bucket_of(self, node: Node) -> int:
        """The bucket of a node, from its hits. Must not be lower for more hits: an ancestor never has
        fewer hits than its descendants, and must never go before them."""

    def add(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            node.bucket = self.bucket_of(node)
            self._open(node.bucket).append(node, node, 1)

    def remove(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            bucket = self._buckets[node.bucket]
            bucket.unlink(node, node, 1)
            if not bucket.count:
                self._close(node.bucket)
            node.bucket = UNLISTED

    def touch(self, nodes: Sequence[Node]) -> None:
        """What was used together stands together, so most of a path is one run and moves as one."""
        end = len(nodes)
        start = 0
        while start < end:
            first = last = nodes[start]
            number = self.bucket_of(first)
            stop = start + 1
            while stop < end and last.next is nodes[stop] and self.bucket_of(nodes[stop]) == number:
                last = nodes[stop]
                stop += 1
            self._move(nodes[start:stop], number)
            start = stop

    def _move(self, run: Sequence[Node], number: int) -> None:
        first, last, before = run[0], run[-1], run[0].bucket
        bucket = self._buckets[before]
        bucket.unlink(first, last, len(run))
        if number != before:
            for node in run:
                node.bucket = number
            if not bucket.count:
                self._close(before)
            bucket = self._open(number)
        bucket.append(first, last, len(run))

    def split(self, upper: Node, lower: Node) -> None:
        upper.bucket = lower.bucket
        self._buckets[lower.bucket].link(upper, upper, 1, after=lower)

    def expose(self, node: Node) -> None:
        """Nothing to do: inner nodes are in the order already, behind their descendants."""

    def victim(self) -> Node | None:
        while self._numbers:
            self.visits += 1
            bucket = self._buckets.get(self._numbers[0])
            if bucket is not None:
                return bucket.oldest
            heapq.heappop(self._numbers)
        return None

    def clear(self) -> None:
        for bucket in self._buckets.values():
            bucket.close()
        self._buckets.clear()
        self._numbers.clear()

    def _open(self, number: int) -> Bucket:
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = Bucket()
            heapq.heappush(self._numbers, number)
        return bucket

    def _close(self, number: int) -> None:
        """A popular node opens and leaves a bucket with each hit, so what it leaves must not pile up."""
        self._buckets.pop(number).close()
        if len(self._numbers) > 2 * len(self._buckets) + self.SLACK:
            self._numbers = sorted(self._buckets)

    def faults(self, unlocked: Collection[Node]) -> Iterator[str]:
        place: dict[Node, int] = {}
        for number in sorted(self._buckets):
            before = len(place)
            for node in self._buckets[number]:
                if node.bucket != number or self.bucket_of(node) != number:
                    yield f"{node} with {node.hits} hits is in bucket {number}, marked {node.bucket}"
                place[node] = len(place)
            if len(place) - before != self._buckets[number].count:
                yield f"bucket {number} counts {self._buckets[number].count}, holds {len(place) - before}"
        if not self._buckets.keys() <= set(self._numbers):
            yield f"buckets {sorted(self._buckets.keys() - set(self._numbers))} are not in the order"
        if len(self._numbers) > 2 * len(self._buckets) + self.SLACK:
            yield f"{len(self._numbers)} bucket numbers are kept for {len(self._buckets)} buckets"
        if place.keys() != set(unlocked):
            yield f"the order holds {len(place)} nodes, {len(unlocked)} are unlocked, or not the same ones"
        for node, position in place.items():
            if node.parent is not None and place.get(node.parent, position) < position:
                yield f"{node.parent} would be evicted before its child {node}"
