"""The eviction policies that there are, each by the one thing that makes it what it is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trellis.radix.eviction import EvictionPolicy
from trellis.radix.heap import HeapPolicy
from trellis.radix.lists import ListPolicy
from trellis.radix.tree import Node


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
        self.touch([node])
        return True


class FIFO(HeapPolicy):
    """First inserted, first out, however often it is used."""

    name = "fifo"

    def key_of(self, node: Node) -> float:
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
