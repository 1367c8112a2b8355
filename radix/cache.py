"""The radix-tree prefix cache: which token prefixes already have K/V, and in which slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from trellis.radix.audit import check_cache
from trellis.radix.eviction import EvictionPolicy
from trellis.radix.policies import make_policy
from trellis.radix.results import Counters, Inserted, Match
from trellis.radix.snapshot import NodeView, view_nodes
from trellis.radix.tree import (
    ITEM,
    IntArray,
    Node,
    Root,
    as_slots,
    common_prefix,
    join_slots,
    page_keys,
    split_edge,
    strip,
    strip_unlocked,
)


class RadixCache:
    """Prefixes of token sequences, their slots, locks on them, and the order in which they are evicted.

    It owns the slots that it holds and hands back those that it drops; it never talks to a ``SlotPool``.
    Not thread-safe: one scheduler owns it.

    page_size: only whole pages of this many tokens are matched, inserted and evicted.
    policy: a name in ``trellis.radix.POLICIES``, or an ``EvictionPolicy``.
    clock: read once a use (match, insert, unlock); must not run backwards. The default counts 1, 2, 3, ...
        With a clock that tells the time, a snapshot tells ages.
    """

    def __init__(
        self,
        page_size: int = 1,
        policy: str | EvictionPolicy = "lru",
        clock: Callable[[], float] | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1 token, got {page_size}")
        self.page_size = page_size
        self.policy = make_policy(policy)
        self._clock: Callable[[], float] = clock or itertools.count(1).__next__
        self._roots: dict[str, Root] = {}
        self._evictable = 0
        self._protected = 0
        self._nodes = 0
        self._counters = Counters()

    # ---- size ----------------------------------------------------------------------------------------

    @property
    def evictable(self) -> int:
        """Tokens in unlocked nodes: what ``evict`` can free."""
        return self._evictable

    @property
    def protected(self) -> int:
        """Tokens in locked nodes."""
        return self._protected

    @property
    def total(self) -> int:
        """Tokens in the tree, and so slots that it owns."""
        return self._evictable + self._protected

    @property
    def nodes(self) -> int:
        """Nodes in the tree, without roots."""
        return self._nodes

    @property
    def roots(self) -> Iterable[Root]:
        """The roots of all namespaces; a namespace without tokens has none."""
        return self._roots.values()

    # ---- look up -------------------------------------------------------------------------------------

    def match(self, tokens: IntArray | Sequence[int], namespace: str = "") -> Match:
        """The longest cached prefix of ``tokens`` (ints, [n]); counts as a use of all of it.

        Where it ends inside an edge, that edge is split, so that ``node`` ends exactly there.
        """
        raw = self._whole_pages(tokens)
        root = self._roots.get(namespace) or Root(namespace)
        path, length, into_edge = self._walk(root, raw)
        if into_edge:
            path[-1] = self._split(path[-1], into_edge)
        self._use(path, self._clock(), hits=1)
        self._counters.matches += 1
        self._counters.matched_from_tokens += len(tokens)
        self._counters.hit_tokens += length
        slots = join_slots([node.raw_slots for node in path])
        return Match(length, slots, path[-1] if path else root)

    def peek(self, tokens: IntArray | Sequence[int], namespace: str = "") -> int:
        """The length of the longest cached prefix, without any trace: no use, no split, no count.

        For ordering requests that are only waiting.
        """
        return self.trace(tokens, namespace)[0]

    def trace(
        self, tokens: IntArray | Sequence[int], namespace: str = "", after: Node | None = None
    ) -> tuple[int, Node | None, bool]:
        """As ``peek``, and where that prefix ends: the last node of it (None: no token), and whether inside of
        its edge.

        after: go on from the end of this node, which is in the tree; ``tokens`` are those behind it.
        """
        start = after or self._roots.get(namespace)
        if start is None:
            return 0, None, False
        path, length, into_edge = self._walk(start, self._whole_pages(tokens))
        return length, path[-1] if path else after, into_edge > 0

    # ---- change --------------------------------------------------------------------------------------

    def insert(
        self, tokens: IntArray | Sequence[int], slots: IntArray | Sequence[int], namespace: str = ""
    ) -> Inserted:
        """Put ``tokens`` (ints, [n]) with their ``slots`` (ints, [n]) into the tree; whole pages only.

        Slots of tokens that are in the tree already are not taken, see ``Inserted``. Both are copied.
        The new node is not locked. Raises ValueError if the lengths differ.
        """
        if len(tokens) != len(slots):
            raise ValueError(
                f"insert needs one slot a token, got {len(tokens)} tokens and {len(slots)} slots"
            )
        raw = self._whole_pages(tokens)
        known = self._roots.get(namespace)
        root = known or Root(namespace)
        path, existing, into_edge = self._walk(root, raw)
        if into_edge:
            path[-1] = self._split(path[-1], into_edge)
        end = path[-1] if path else root
        length = existing
        now = self._clock()
        if ITEM * existing < len(raw):
            key = page_keys(raw, self.page_size)(existing)
            if not end.children or key not in end.children:  # else another page with the same hash
                if known is None:
                    self._roots[namespace] = root
                length = len(raw) // ITEM
                owned = np.asarray(slots, np.int32)[existing:length].tobytes()
                end = self._grow(end, key, raw[ITEM * existing :], owned, now)
        self._use(path, now, hits=0)
        return Inserted(end, existing, length)

    def lock(self, node: Node) -> None:
        """Keep ``node`` and its ancestors from eviction until as many ``unlock``. O(path).

        The lock means "up to the end of this node" and goes on meaning that when the node is split.
        Raises ValueError if the node is not in the tree any more (it was evicted or discarded).
        """
        if not node.attached:
            raise ValueError(f"cannot lock {node}: it has left the tree, match again")
        node.held += 1
        locked = []
        part: Node | None = node
        while part is not None:
            if part.locks == 0 and part.raw_tokens:
                locked.append(part)
            part.locks += 1
            part = part.parent
        tokens = _tokens_of(locked)
        self._evictable -= tokens
        self._protected += tokens
        self.policy.remove(locked)

    def unlock(self, node: Node) -> None:
        """Take back one ``lock(node)``; counts as a use of the path. O(path).

        If the node was discarded meanwhile, only what survives of its path is unlocked. Raises ValueError,
        with nothing changed, if this very node holds no lock.
        """
        if node.held == 0:
            raise ValueError(f"cannot unlock {node}: no lock was taken on it that is not taken back already")
        now = self._clock()
        node.held -= 1
        unlocked = []
        part: Node | None = node
        while part is not None:
            part.locks -= 1
            part.stamp = now
            if part.locks == 0 and part.raw_tokens:
                unlocked.append(part)
            part = part.parent
        tokens = _tokens_of(unlocked)
        self._protected -= tokens
        self._evictable += tokens
        self.policy.add(unlocked)

    def evict(self, n: int) -> IntArray:
        """Drop unlocked tokens, leaf by leaf in the order of the policy; returns their slots (int32).

        Frees exactly ``n`` rounded up to pages, or all that is unlocked if that is less: of the last leaf
        only the tail goes. O(leaves dropped), whatever the size of the tree.
        """
        freed: list[bytes] = []
        missing = n
        while missing > 0:
            leaf = self.policy.victim()
            if leaf is None:
                break
            surplus = leaf.length - (missing + -missing % self.page_size)
            if surplus > 0:
                self._split(leaf, surplus)
            missing -= leaf.length
            freed += self._drop(leaf)
            self._counters.evicted_nodes += 1
        slots = join_slots(freed)
        self._counters.evicted_tokens += len(slots)
        return slots

    def flush(self) -> IntArray:
        """Drop every unlocked node; returns their slots (int32). O(nodes), and little for each."""
        freed = bytearray()
        held: list[Node] = list(self._roots.values())
        while held:
            parent = held.pop()
            children = parent.children or {}
            kept = {key: child for key, child in children.items() if child.locks}
            held += kept.values()
            parent.children = kept or None
            if not kept and isinstance(parent, Root):
                del self._roots[parent.namespace]
            gone = (
                [child for child in children.values() if not child.locks] if kept else list(children.values())
            )
            del children
            self._nodes -= strip_unlocked(gone, freed)
        self.policy.clear()
        self._evictable = 0
        slots = as_slots(freed)
        self._counters.flushed_tokens += len(slots)
        return slots

    def discard(self, node: Node, keep: int) -> IntArray:
        """Cut the tree on the path to ``node`` after ``keep`` tokens from the root; returns the slots freed.

        For tokens that were inserted before they were computed, when the computation failed. Everything
        beyond the cut goes, locked or not: the rest of this path and all that hangs below it.

        keep: tokens of the path that stay, rounded down to whole pages. If the path is not longer than
            that (another ``discard`` cut it already), nothing happens and the result is empty.

        Locks on dropped nodes become detached: they protect nothing that is gone, still protect the part of
        their path that survives, and are given back by ``unlock`` as any other. So each of several requests
        that built on the failed tokens may discard and unlock in any order. Raises ValueError for a
        negative ``keep``.
        """
        if keep < 0:
            raise ValueError(f"cannot keep {keep} tokens: keep must not be negative")
        keep -= keep % self.page_size
        top = node
        start = top.depth() - top.length
        if start + top.length <= keep:
            return join_slots([])
        while start > keep:
            assert top.parent is not None
            top = top.parent
            start -= top.length
        if start < keep:
            self._split(top, keep - start)
        slots = join_slots(self._drop(top))
        self._counters.discarded_tokens += len(slots)
        return slots

    # ---- look inside ---------------------------------------------------------------------------------

    def walk(self) -> Iterator[Node]:
        """All nodes but the roots, breadth first. The tree must not change meanwhile."""
        level: list[Node] = list(self._roots.values())
        while level:
            level = [child for node in level for child in (node.children or {}).values()]
            yield from level

    def snapshot(
        self,
        limit: int | None = None,
        edge_tokens: int | None = None,
        only: Callable[[str], bool] | None = None,
    ) -> list[NodeView]:
        """The tree as plain data, parents before children, those with the most hits first.

        limit: nodes at most; then the work is bounded too, whatever the size of the tree. edge_tokens: leading
        tokens of each edge to give at most. only: says whether a namespace is wanted.
        """
        return view_nodes(self._roots.values(), limit, edge_tokens, only)

    def stats(self) -> dict[str, int]:
        """Sizes now, and totals since the start."""
        return {
            "nodes": self._nodes,
            "namespaces": len(self._roots),
            "tokens": self.total,
            "evictable_tokens": self._evictable,
            "protected_tokens": self._protected,
            "page_size": self.page_size,
            "eviction_visits": self.policy.visits,
            **vars(self._counters),
        }

    def check(self) -> None:
        """Verify every invariant, O(tree); raises ``InvariantError`` naming all that is wrong."""
        check_cache(self)

    # ---- private -------------------------------------------------------------------------------------

    def _whole_pages(self, tokens: IntArray | Sequence[int]) -> bytes:
        array = np.asarray(tokens, dtype=np.int32)
        if array.ndim != 1:
            raise ValueError(f"tokens must be one sequence of ids, got an array of shape {array.shape}")
        return array[: len(array) - len(array) % self.page_size].tobytes()

    def _walk(self, start: Node, raw: bytes) -> tuple[list[Node], int, int]:
        """Follow the tokens ``raw`` (whole pages) down from the end of a node.

        Returns the nodes passed (without the first), the tokens matched, and how many of these are of the
        last node if it was not matched to its end (else 0). The usual edge matches whole, which one
        comparison of memory tells; only the last one is compared token by token.
        """
        key_at = page_keys(raw, self.page_size)
        path: list[Node] = []
        at = 0
        n = len(raw) // ITEM
        children = start.children
        while children and at < n:
            child = children.get(key_at(at))
            if child is None:
                break
            edge = child.raw_tokens
            if not raw.startswith(edge, ITEM * at):
                same = common_prefix(edge, raw, at)
                same -= same % self.page_size
                if same:  # else it is another page with the same hash
                    path.append(child)
                return path, at + same, same
            path.append(child)
            at += len(edge) // ITEM
            children = child.children
        return path, at, 0

    def _use(self, path: list[Node], now: float, hits: int) -> None:
        """Deepest first, so that an ancestor is never less recently used than its descendants."""
        unlocked = []
        for node in reversed(path):
            node.stamp = now
            node.hits += hits
            if not node.locks:
                unlocked.append(node)
        if unlocked:
            self.policy.touch(unlocked)

    def _grow(self, parent: Node, key: int, raw_tokens: bytes, raw_slots: bytes, now: float) -> Node:
        """A new leaf under ``parent``. Call before ``_use`` of the path, which is deepest first."""
        leaf = Node(key, raw_tokens, raw_slots, parent, now)
        if parent.children is None:
            parent.children = {}
        parent.children[key] = leaf
        self._nodes += 1
        self._evictable += leaf.length
        self._counters.inserted_tokens += leaf.length
        self.policy.add([leaf])
        return leaf

    def _split(self, lower: Node, at: int) -> Node:
        """Cut an edge, see ``split_edge``. Returns the new upper node."""
        upper = split_edge(lower, at, self.page_size)
        self._nodes += 1
        self._counters.splits += 1
        if not upper.locks:
            self.policy.split(upper, lower)
        return upper

    def _drop(self, top: Node) -> list[bytes]:
        """Take ``top`` and all below it out of the tree, locked or not; returns their slots."""
        parent = top.parent
        assert parent is not None
        assert parent.children is not None
        del parent.children[top.key]
        dropped = strip([top])
        self._nodes -= len(dropped.unlocked) + dropped.locked
        self._evictable -= dropped.unlocked_tokens
        self._protected -= dropped.locked_tokens
        self.policy.remove(dropped.unlocked)
        if not parent.children:
            parent.children = None
            if isinstance(parent, Root):
                del self._roots[parent.namespace]
            elif not parent.locks:
                self.policy.expose(parent)
        return dropped.slots


def _tokens_of(nodes: list[Node]) -> int:
    return sum([len(node.raw_tokens) for node in nodes]) // ITEM
