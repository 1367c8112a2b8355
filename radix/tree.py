"""The nodes of the radix tree: what an edge holds, how it is compared and how it is cut.

One ``Node`` is one edge of the tree together with the point where that edge ends. This file knows nothing
of namespaces, counters or eviction; ``cache.py`` puts those around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

TOKEN_BYTES = 4  # keys are int32

NO_TOKENS: IntArray = np.empty((2, 0), np.int32)
NO_TOKENS.flags.writeable = False

UNLISTED = -1


class Node:
    """One edge: a run of tokens, the slots of the same tokens, and the children that continue it.

    data: int32 [2, length]; row 0 the tokens, row 1 their slots. One array, not two: an array's header is
        larger than most edges. Empty for a root and for a node that has left the tree.
    parent: None for a root. A node that has left the tree keeps its parent, see ``RadixCache.discard``.
    children: by the key of their first page, see ``page_keys``; None for a leaf, so that a leaf pays for no dict.
    locks: live handles on this node and on everything below it. held: those on this very node.
    stamp, born: clock of the last use and of the insertion. hits: matches that went through.
    bucket, prev, next: owned by the eviction policy (place in its order; ``UNLISTED``: none).
    """

    __slots__ = (
        "born",
        "bucket",
        "children",
        "data",
        "held",
        "hits",
        "locks",
        "next",
        "parent",
        "prev",
        "stamp",
    )

    def __init__(self, data: IntArray, parent: Node | None, born: int) -> None:
        self.data = data
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
        length: int = self.data.shape[1]
        return length

    @property
    def tokens(self) -> IntArray:
        """int32 [length]."""
        row: IntArray = self.data[0]
        return row

    @property
    def slots(self) -> IntArray:
        """int32 [length]; where the K/V of ``tokens`` lives."""
        row: IntArray = self.data[1]
        return row

    @property
    def attached(self) -> bool:
        """Is this node part of a tree? A root always is."""
        return self.data.shape[1] > 0 or self.parent is None

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
        super().__init__(NO_TOKENS, None, 0)
        self.namespace = namespace


def page_keys(raw: bytes, page_size: int) -> Callable[[int], int]:
    """A function: position of a token to the key under which the child that begins there is found.

    raw: the tokens' memory, ``tokens.tobytes()``. With pages of one token the key is that token. With larger
    pages it is a 64-bit hash of the page, since the page itself (289 bytes for 64 tokens) would be the
    largest part of a node. Tokens are always compared after the look-up, so two pages with one hash can
    never be mistaken for each other: the second is just not cached.
    """
    if page_size == 1:
        return memoryview(raw).cast("i").__getitem__
    page_bytes = TOKEN_BYTES * page_size
    return lambda at: hash(raw[TOKEN_BYTES * at : TOKEN_BYTES * at + page_bytes])


def node_key(node: Node, page_size: int) -> int:
    """The key of a node in its parent."""
    if page_size == 1:
        return int(node.data[0, 0])
    return page_keys(node.data[0, :page_size].tobytes(), page_size)(0)


def common_prefix(edge: IntArray, tokens: IntArray, at: int) -> int:
    """How many leading tokens of ``edge`` equal ``tokens[at:]`` (neither empty); vectorised."""
    n = min(len(edge), len(tokens) - at)
    different = edge[:n] != tokens[at : at + n]
    first = int(different.argmax())
    return first if different[first] else n


def cut(data: IntArray, at: int) -> tuple[IntArray, IntArray]:
    """The two parts of an edge, [2, at] and [2, length - at].

    A part is a view of the same memory where it fills at least half of it, else a copy. So a cut copies
    less than the edge, a long edge that is trimmed token by token is copied a logarithmic number of times,
    and no array ever holds alive more than twice the memory that its node uses.
    """
    memory = data if data.base is None else data.base
    assert isinstance(memory, np.ndarray)

    def settle(part: IntArray) -> IntArray:
        return part if 2 * part.size >= memory.size else part.copy()

    return settle(data[:, :at]), settle(data[:, at:])
