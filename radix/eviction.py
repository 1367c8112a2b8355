"""Which unlocked leaf goes next: the eviction policies and the orders they keep.

A policy is told of every event that changes the order, so that choosing a victim never looks through the
tree. Two kinds of order are enough for all of them (``lists.py``, ``heap.py``):

``ListPolicy``  Doubly linked lists through the nodes themselves, oldest first. For orders of use.
``HeapPolicy``  A queue and a heap of unlocked leaves by any key that never falls while the node lives.

To add a policy: subclass one of the two, say ``bucket_of`` or ``key_of``, add it to ``POLICIES``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

from trellis.radix.tree import Node


class EvictionPolicy(ABC):
    """An incrementally kept order of the unlocked nodes of all namespaces.

    ``visits`` counts the nodes that ``victim`` looked at: the work of evicting, for tests and metrics.
    Nodes that are given together are a run of one path, deepest first.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self.visits = 0

    @abstractmethod
    def add(self, nodes: Sequence[Node]) -> None:
        """These became unlocked: they are new, or their last lock went."""

    @abstractmethod
    def remove(self, nodes: Sequence[Node]) -> None:
        """These were unlocked and are being locked, or are leaving the tree; in any order."""

    @abstractmethod
    def touch(self, nodes: Sequence[Node]) -> None:
        """These unlocked nodes were used; their stamps and hits are already the new ones."""

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
    def clear(self) -> None:
        """Every unlocked node is leaving the tree at once."""

    @abstractmethod
    def faults(self, unlocked: Collection[Node]) -> Iterator[str]:
        """What is wrong with the order, given the unlocked nodes; O(nodes). For ``RadixCache.check``."""
