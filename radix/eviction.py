"""Which unlocked leaf goes next: the eviction policies and the orders they keep.

A policy is told of every event that changes the order, so that choosing a victim never looks through the
tree. Two kinds of order are enough for all of them:

``ListPolicy``  Buckets, each a doubly linked list through the nodes themselves, oldest first. It holds all
    unlocked nodes, inner ones too, and stays right with O(1) work an event because a use refreshes a whole
    path, deepest node first: an ancestor is always in a later place than its descendants. Hence the first
    node of the first bucket has no unlocked child; and it has no locked one, since a lock counts on all
    ancestors. It is a leaf. No entry is ever stale, no operation is ever long.
``HeapPolicy``  A heap of unlocked leaves by any key that never falls while the node lives. For policies
    whose order is not that of use.

To add a policy: subclass one of the two, say ``bucket_of`` or ``key_of``, add it to ``POLICIES``.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

from trellis.radix.tree import NO_TOKENS, UNLISTED, Node


class EvictionPolicy(ABC):
    """An incrementally kept order of the unlocked nodes of all namespaces.

    ``visits`` counts the nodes that ``victim`` looked at: the work of evicting, for tests and metrics.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self.visits = 0

    @abstractmethod
    def add(self, node: Node) -> None:
        """A node became unlocked: it is new, or its last lock went. On a path: deepest first."""

    @abstractmethod
    def remove(self, node: Node) -> None:
        """An unlocked node was locked or is leaving the tree. Called before either takes effect."""

    @abstractmethod
    def touch(self, node: Node) -> None:
        """An unlocked node was used; its stamp and hits are already the new ones. Deepest first."""

    @abstractmethod
    def split(self, upper: Node, lower: Node) -> None:
        """``upper`` is a new parent of the unlocked ``lower``, with the same stamp, birth and hits."""

    @abstractmethod
    def expose(self, node: Node) -> None:
        """An unlocked node lost its last child: it is now a leaf."""

    @abstractmethod
    def victim(self) -> Node | None:
        """The unlocked leaf that goes next; None if there is none. It stays in the order until removed."""

    @abstractmethod
    def faults(self, unlocked: Collection[Node]) -> Iterator[str]:
        """What is wrong with the order, given the unlocked nodes; O(nodes). For ``RadixCache.check``."""


class _Bucket:
    """A circular list of nodes through ``prev`` and ``next``; ``end`` is a node that stands for its ends."""

    __slots__ = ("count", "end")

    def __init__(self) -> None:
        self.end = Node(NO_TOKENS, None, 0)
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

    def append(self, node: Node) -> None:
        last = self.end.prev
        assert last is not None
        self.link(node, last)

    def link(self, node: Node, after: Node) -> None:
        following = after.next
        assert following is not None
        node.prev = after
        node.next = following
        after.next = following.prev = node
        self.count += 1

    def renew(self, node: Node) -> None:
        """Unlink and append, in one step since every match does this to every node of its path."""
        before, following, end = node.prev, node.next, self.end
        if following is end:
            return
        last = end.prev
        assert before is not None
        assert following is not None
        assert last is not None
        before.next = following
        following.prev = before
        node.prev = last
        node.next = end
        last.next = end.prev = node

    def unlink(self, node: Node) -> None:
        before, following = node.prev, node.next
        assert before is not None
        assert following is not None
        before.next = following
        following.prev = before
        node.prev = node.next = None
        self.count -= 1


class ListPolicy(EvictionPolicy):
    """Unlocked nodes in buckets; the lowest bucket goes first, in it the least recently used."""

    SLACK = 64

    def __init__(self) -> None:
        super().__init__()
        self._buckets: dict[int, _Bucket] = {}  # none is empty
        self._numbers: list[int] = []  # a heap; has the keys of _buckets, and others that are gone

    @abstractmethod
    def bucket_of(self, node: Node) -> int:
        """The bucket of a node, from its hits. Must not be lower for more hits: an ancestor never has
        fewer hits than its descendants, and must never go before them."""

    def add(self, node: Node) -> None:
        number = self.bucket_of(node)
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = _Bucket()
            heapq.heappush(self._numbers, number)
        node.bucket = number
        bucket.append(node)

    def remove(self, node: Node) -> None:
        bucket = self._buckets[node.bucket]
        bucket.unlink(node)
        if not bucket.count:
            self._close(node.bucket)
        node.bucket = UNLISTED

    def touch(self, node: Node) -> None:
        if self.bucket_of(node) == node.bucket:
            self._buckets[node.bucket].renew(node)
        else:
            self.remove(node)
            self.add(node)

    def split(self, upper: Node, lower: Node) -> None:
        upper.bucket = lower.bucket
        self._buckets[lower.bucket].link(upper, after=lower)

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

    def _close(self, number: int) -> None:
        """A popular node opens and leaves a bucket with each hit, so what it leaves must not pile up."""
        del self._buckets[number]
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


class LRU(ListPolicy):
    """Least recently used first. A use is a match, an insert, or the end of a lock."""

    name = "lru"

    def bucket_of(self, node: Node) -> int:  # noqa: ARG002
        return 0


class LFU(ListPolicy):
    """Fewest hits first; of equals the least recently used."""

    name = "lfu"

    def bucket_of(self, node: Node) -> int:
        return node.hits


class SLRU(ListPolicy):
    """Segmented LRU: nodes never matched again go first, so that one-off prompts cannot wash out shared ones.

    A node's first hit moves it from the probationary segment to the protected one. That may hold at most
    ``protected_share`` of the unlocked nodes; above that its oldest nodes lose their hits and go back to
    the young end of probation, so what was popular long ago does leave. At most ``DEMOTIONS`` go back each
    time a victim is chosen, which bounds the time of that choice.
    Source: Karedla, Love, Wherry, "Caching strategies to improve disk system performance", 1994.
    """

    name = "slru"
    DEMOTIONS = 4

    def __init__(self, protected_share: float = 0.8) -> None:
        super().__init__()
        if not 0 <= protected_share <= 1:
            raise ValueError(f"protected_share must be from 0 to 1, got {protected_share}")
        self.protected_share = protected_share

    def bucket_of(self, node: Node) -> int:
        return 1 if node.hits else 0

    def victim(self) -> Node | None:
        for _ in range(self.DEMOTIONS):
            if not self._demote():
                break
        return super().victim()

    def _demote(self) -> bool:
        """The oldest protected node has no protected descendant, so the order stays right without it."""
        protected = self._buckets.get(1)
        if protected is None:
            return False
        probation = self._buckets.get(0)
        total = protected.count + (probation.count if probation else 0)
        if protected.count <= self.protected_share * total:
            return False
        self.visits += 1
        node = protected.oldest
        node.hits = 0
        self.touch(node)
        return True


class HeapPolicy(EvictionPolicy):
    """Unlocked leaves in a heap by ``key_of``, lowest first.

    A node has at most one entry. An entry is not searched for when its node is locked, gets a child, dies
    or gets a higher key: it is put right when it comes to the top. Entries are at most twice the unlocked
    nodes (and ``SLACK``); beyond that the heap is rebuilt, which the events since the last time pay for.
    """

    SLACK = 64

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, int, Node]] = []  # key, tie-break, node
        self._pushed = 0
        self._members = 0

    @abstractmethod
    def key_of(self, node: Node) -> int:
        """The node's place; may rise, must never fall while the node is in the tree."""

    def add(self, node: Node) -> None:
        self._members += 1
        if not node.children:
            self._push(node)

    def remove(self, node: Node) -> None:  # noqa: ARG002
        self._members -= 1
        if len(self._heap) > 2 * self._members + self.SLACK:
            self._rebuild()

    def touch(self, node: Node) -> None:
        """Nothing to do: a key that rose is found when its entry comes to the top."""

    def split(self, upper: Node, lower: Node) -> None:  # noqa: ARG002
        """The upper part is no leaf; the entry of the lower part, if it has one, goes on standing for it."""
        self._members += 1

    def expose(self, node: Node) -> None:
        self._push(node)

    def victim(self) -> Node | None:
        while self._heap:
            self.visits += 1
            key, _, node = self._heap[0]
            if not self._is_candidate(node):
                heapq.heappop(self._heap)
                node.bucket = UNLISTED
            elif self.key_of(node) > key:
                heapq.heapreplace(self._heap, self._entry(node))
            else:
                return node
        return None

    def faults(self, unlocked: Collection[Node]) -> Iterator[str]:
        entries = {node: key for key, _, node in self._heap}
        leaves = [node for node in unlocked if not node.children]
        if len(entries) != len(self._heap):
            yield f"{len(self._heap)} heap entries are of only {len(entries)} nodes"
        if self._members != len(unlocked):
            yield f"the policy counts {self._members} unlocked nodes, there are {len(unlocked)}"
        if len(self._heap) > 2 * self._members + self.SLACK:
            yield f"{len(self._heap)} heap entries for {self._members} unlocked nodes"
        for node in leaves:
            if node not in entries or node.bucket == UNLISTED:
                yield f"unlocked leaf {node} has no heap entry"
            elif entries[node] > self.key_of(node):
                yield f"{node} is filed under {entries[node]}, after its key {self.key_of(node)}"

    @staticmethod
    def _is_candidate(node: Node) -> bool:
        return node.locks == 0 and not node.children and node.length > 0

    def _push(self, node: Node) -> None:
        if node.bucket == UNLISTED:
            node.bucket = 0
            heapq.heappush(self._heap, self._entry(node))

    def _entry(self, node: Node) -> tuple[int, int, Node]:
        self._pushed += 1
        return self.key_of(node), self._pushed, node

    def _rebuild(self) -> None:
        kept = []
        for entry in self._heap:
            node = entry[2]
            if self._is_candidate(node):
                kept.append(entry)
            else:
                node.bucket = UNLISTED
        heapq.heapify(kept)
        self._heap = kept


class FIFO(HeapPolicy):
    """First inserted, first out, however often it is used."""

    name = "fifo"

    def key_of(self, node: Node) -> int:
        return node.born


POLICIES: Mapping[str, type[EvictionPolicy]] = MappingProxyType(
    {policy.name: policy for policy in (LRU, LFU, SLRU, FIFO)}
)


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """A new policy by name, or the given one. Raises ValueError for an unknown name."""
    if isinstance(policy, EvictionPolicy):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"unknown eviction policy {policy!r}; known are {', '.join(sorted(POLICIES))}")
    return POLICIES[policy]()
