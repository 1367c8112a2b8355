"""The nodes of the radix tree: what an edge holds, how it is compared and how it is cut.

One ``Node`` is one edge of the tree together with the point where that edge ends. This file knows nothing
of namespaces, counters or eviction; ``cache.py`` puts those around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

ITEM = 4  # bytes of a token or a slot: both are int32

UNLISTED = -1


class Node:
    """One edge: a run of tokens, the slots of the same tokens, and the children that continue it.

    raw_tokens, raw_slots: int32 values as bytes; ``tokens`` and ``slots`` show them as arrays. Bytes, since
        finding out whether an edge continues a prompt is then one comparison of memory, and since their header
        is a third of an array's. Empty for a root and for a node that has left the tree.
    parent: None for a root. A node that has left the tree keeps its parent, see ``RadixCache.discard``.
    key: where it is found in its parent's children, see ``page_keys``.
    children: None for a leaf, so that a leaf pays for no dict.
    locks: live handles on this node and on everything below it. held: those on this very node.
    stamp, born: clock of the last use and of the insertion. hits: matches that went through.
    bucket, prev, next: owned by the eviction policy (place in its order; ``UNLISTED``: none).
    """

    __slots__ = (
        "born",
        "bucket",
        "children",
        "held",
        "hits",
        "key",
        "locks",
        "next",
        "parent",
        "prev",
        "raw_slots",
        "raw_tokens",
        "stamp",
    )

    def __init__(
        self, key: int, raw_tokens: bytes, raw_slots: bytes, parent: Node | None, born: float
    ) -> None:
        self.key = key
        self.raw_tokens = raw_tokens
        self.raw_slots = raw_slots
        self.parent = parent
        self.children: dict[int, Node] | None = None
        self.locks = 0
        self.held = 0
        self.hits = 0
        self.stamp = born
        self.born = born
        self.bucket = UNLISTED
        self.prev: Node | None = None
        self.next: Node | None = None

    @property
    def length(self) -> int:
        """Tokens on this edge; 0 for a root and for a node that has left the tree."""
        return len(self.raw_tokens) // ITEM

    @property
    def tokens(self) -> IntArray:
        """int32 [length], read-only, not a copy."""
        return np.frombuffer(self.raw_tokens, np.int32)

    @property
    def slots(self) -> IntArray:
        """int32 [length], read-only, not a copy; where the K/V of ``tokens`` lives."""
        return np.frombuffer(self.raw_slots, np.int32)

    @property
    def attached(self) -> bool:
        """Is this node part of a tree? A root always is."""
        return bool(self.raw_tokens) or self.parent is None

    def ancestry(self) -> Iterator[Node]:
        """This node, its parent, ... up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def depth(self) -> int:
        """Tokens from the root to the end of this node (of what is left, if it has left the tree)."""
        return sum(node.length for node in self.ancestry())

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} length={self.length} locks={self.locks} "
            f"children={len(self.children or ())}{'' if self.attached else ' detached'}>"
        )


class Root(Node):
    """The start of one namespace; it holds no tokens."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(0, b"", b"", None, 0)
        self.namespace = namespace


def page_keys(raw: bytes, page_size: int) -> Callable[[int], int]:
    """A function: position of a token to the key under which the child that begins there is found.

    raw: the tokens' memory. With pages of one token the key is that token. With larger pages it is a 64-bit
    hash of the page, since the page itself (289 bytes for 64 tokens) would be the largest part of a node.
    Tokens are always compared after the look-up, so two pages with one hash can never be mistaken for each
    other: the second is just not cached.
    """
    if page_size == 1:
        return memoryview(raw).cast("i").__getitem__
    page_bytes = ITEM * page_size
    return lambda at: hash(raw[ITEM * at : ITEM * at + page_bytes])


def common_prefix(edge: bytes, raw: bytes, at: int) -> int:
    """How many leading tokens of ``edge`` equal those of ``raw`` from the token ``at`` on; vectorised."""
    n = min(len(edge) // ITEM, len(raw) // ITEM - at)
    different = np.frombuffer(edge, np.int32, n) != np.frombuffer(raw, np.int32, n, ITEM * at)
    first = int(different.argmax())
    return first if different[first] else n


def split_edge(lower: Node, at: int, page_size: int) -> Node:
    """Cut an edge after ``at`` tokens, 0 < at < length, and put a new node there; copies this edge only.

    The given object becomes the lower part: whoever holds it means the place where it ends. The upper part
    gets the same count of locks, all of which are below it, so it holds none itself. Returns the upper part.
    """
    parent = lower.parent
    assert parent is not None
    assert parent.children is not None
    cut = ITEM * at
    upper = Node(lower.key, lower.raw_tokens[:cut], lower.raw_slots[:cut], parent, lower.born)
    upper.locks, upper.stamp, upper.hits = lower.locks, lower.stamp, lower.hits
    parent.children[upper.key] = upper
    lower.raw_tokens = lower.raw_tokens[cut:]
    lower.raw_slots = lower.raw_slots[cut:]
    lower.key = page_keys(lower.raw_tokens, page_size)(0)
    lower.parent = upper
    upper.children = {lower.key: lower}
    return upper


@dataclass
class Stripped:
    """What ``strip`` took: all slots; the nodes that no lock was on, and how many tokens they had; of the others
    the numbers."""

    slots: list[bytes] = field(default_factory=list)
    unlocked: list[Node] = field(default_factory=list)
    unlocked_tokens: int = 0
    locked: int = 0
    locked_tokens: int = 0


def strip(tops: list[Node], unlisted: bool = False) -> Stripped:
    """Take all that the nodes and their descendants hold; their parents no longer refer to them.

    Stripped nodes keep their parents: through these a detached lock reaches the ancestors that survive. Nothing
    that lives refers to them, nor they to each other but upwards, so counting references frees them: the tree
    never leaves work to Python's cyclic collector. unlisted: take them out of the eviction order as well, which
    is given up as a whole. All are added to ``tops``.
    """
    taken = Stripped()
    slots, unlocked = taken.slots, taken.unlocked
    for node in tops:  # which grows meanwhile
        if node.children:
            tops.extend(node.children.values())
            node.children = None
        slots.append(node.raw_slots)
        if node.locks:
            taken.locked += 1
            taken.locked_tokens += len(node.raw_tokens) // ITEM
        elif unlisted:
            node.prev = node.next = None
            node.bucket = UNLISTED
        else:
            unlocked.append(node)
            taken.unlocked_tokens += len(node.raw_tokens) // ITEM
        node.raw_tokens = node.raw_slots = b""
    return taken


def strip_unlocked(tops: list[Node], slots: bytearray) -> int:
    """``strip`` for nodes without locks whose eviction order is given up as a whole; returns how many there were.

    Each node is touched once and freed at once, while it is in the processor's cache: of a large tree that is
    most of the cost. ``tops`` is used up, the slots are added to ``slots``.
    """
    count = 0
    tops.reverse()
    while tops:
        node = tops.pop()
        if node.children:
            tops.extend(node.children.values())
            node.children = None
        slots += node.raw_slots
        node.raw_tokens = node.raw_slots = b""
        node.prev = node.next = None
        node.bucket = UNLISTED
        count += 1
    return count


def join_slots(parts: Iterable[bytes]) -> IntArray:
    """int32; a new array of all of them."""
    return as_slots(bytearray().join(parts))


def as_slots(joined: bytearray) -> IntArray:
    """int32; the same memory."""
    return np.frombuffer(joined, np.int32) if joined else np.empty(0, np.int32)
