"""The radix-tree prefix cache: which token prefixes already have K/V, and in which slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from trellis.radix.audit import check_cache
from trellis.radix.eviction import EvictionPolicy, make_policy
from trellis.radix.results import Counters, Inserted, Match
from trellis.radix.snapshot import NodeView, view_nodes
from trellis.radix.tree import (
    NO_TOKENS,
    TOKEN_BYTES,
    IntArray,
    Node,
    Root,
    common_prefix,
    cut,
    node_key,
    page_keys,
)

NO_SLOTS: IntArray = NO_TOKENS[1]


class RadixCache:
    """Prefixes of token sequences, their slots, locks on them, and the order in which they are evicted.

    It owns the slots that it holds and hands back those that it drops; it never talks to a ``SlotPool``.
    Not thread-safe: one scheduler owns it.

    page_size: only whole pages of this many tokens are matched, inserted and evicted.
    policy: a name in ``trellis.radix.POLICIES``, or an ``EvictionPolicy``.
    clock: read once a use (match, insert, unlock); must not run backwards. The default counts 1, 2, 3, ...
    """

    def __init__(
        self,
        page_size: int = 1,
        policy: str | EvictionPolicy = "lru",
        clock: Callable[[], int] | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1 token, got {page_size}")
        self.page_size = page_size
        self.policy = make_policy(policy)
        self._clock = clock or itertools.count(1).__next__
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
        keys = self._whole_pages(tokens)
        root = self._roots.get(namespace) or Root(namespace)
        path, length, into_edge = self._walk(root, keys)
        if into_edge:
            path[-1] = self._split(path[-1], into_edge)
        self._use(path, self._clock(), hits=1)
        self._counters.matches += 1
        self._counters.matched_from_tokens += len(tokens)
        self._counters.hit_tokens += length
        slots = np.concatenate([node.data[1] for node in path]) if path else NO_SLOTS.copy()
        return Match(length, slots, path[-1] if path else root)

    def peek(self, tokens: IntArray | Sequence[int], namespace: str = "") -> int:
        """The length of the longest cached prefix, without any trace: no use, no split, no count.

        For ordering requests that are only waiting.
        """
        root = self._roots.get(namespace)
        return self._walk(root, self._whole_pages(tokens))[1] if root else 0

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
        keys = self._whole_pages(tokens)
        known = self._roots.get(namespace)
        root = known or Root(namespace)
        path, existing, into_edge = self._walk(root, keys)
        if into_edge:
            path[-1] = self._split(path[-1], into_edge)
        end = path[-1] if path else root
        length = existing
        now = self._clock()
        if existing < len(keys) and self._has_room(end, keys, existing):
            if known is None:
                self._roots[namespace] = root
            end = self._grow(end, keys[existing:], np.asarray(slots, np.int32)[existing : len(keys)], now)
            length = len(keys)
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
        for part in node.ancestry():
            if part.locks == 0 and part.length:
                self.policy.remove(part)
                self._evictable -= part.length
                self._protected += part.length
            part.locks += 1

    def unlock(self, node: Node) -> None:
        """Take back one ``lock(node)``; counts as a use of the path. O(path).

        If the node was discarded meanwhile, only what survives of its path is unlocked. Raises ValueError,
        with nothing changed, if this very node holds no lock.
        """
        if node.held == 0:
            raise ValueError(f"cannot unlock {node}: no lock was taken on it that is not taken back already")
        now = self._clock()
        node.held -= 1
        for part in node.ancestry():
            part.locks -= 1
            part.stamp = now
            if part.locks == 0 and part.length:
                self._protected -= part.length
                self._evictable += part.length
                self.policy.add(part)

    def evict(self, n: int) -> IntArray:
        """Drop unlocked tokens, leaf by leaf in the order of the policy; returns their slots (int32).

        Frees exactly ``n`` rounded up to pages, or all that is unlocked if that is less: of the last leaf
        only the tail goes. O(leaves dropped), whatever the size of the tree.
        """
        freed: list[IntArray] = []
        missing = n
        while missing > 0:
            leaf = self.policy.victim()
            if leaf is None:
                break
            surplus = leaf.length - self._round_up(missing)
            if surplus > 0:
                self._split(leaf, surplus)
            missing -= leaf.length
            self._drop(leaf, freed)
            self._counters.evicted_nodes += 1
        slots = _concatenate(freed)
        self._counters.evicted_tokens += len(slots)
        return slots

    def flush(self) -> IntArray:
        """Drop every unlocked node; returns their slots (int32). O(nodes)."""
        freed: list[IntArray] = []
        open_nodes: list[Node] = list(self._roots.values())
        while open_nodes:
            for child in list((open_nodes.pop().children or {}).values()):
                if child.locks:
                    open_nodes.append(child)
                else:
                    self._drop(child, freed)
        slots = _concatenate(freed)
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
            return NO_SLOTS.copy()
        while start > keep:
            assert top.parent is not None
            top = top.parent
            start -= top.length
        if start < keep:
            self._split(top, keep - start)
        freed: list[IntArray] = []
        self._drop(top, freed)
        slots = _concatenate(freed)
        self._counters.discarded_tokens += len(slots)
        return slots

    # ---- look inside ---------------------------------------------------------------------------------

    def walk(self) -> Iterator[Node]:
        """All nodes but the roots, breadth first. The tree must not change meanwhile."""
        level: list[Node] = list(self._roots.values())
        while level:
            level = [child for node in level for child in (node.children or {}).values()]
            yield from level

    def snapshot(self, limit: int | None = None) -> list[NodeView]:
        """The tree as plain data, parents before children; at most ``limit`` nodes, the top ones."""
        return view_nodes(self._roots.values(), limit)

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

    def _whole_pages(self, tokens: IntArray | Sequence[int]) -> IntArray:
        keys = np.asarray(tokens, dtype=np.int32)
        if keys.ndim != 1:
            raise ValueError(f"tokens must be one sequence of ids, got an array of shape {keys.shape}")
        rest = len(keys) % self.page_size
        return keys[: len(keys) - rest] if rest else keys

    def _round_up(self, n: int) -> int:
        return n + -n % self.page_size

    def _walk(self, root: Node, keys: IntArray) -> tuple[list[Node], int, int]:
        """Follow ``keys`` (whole pages) down from the root.

        Returns the nodes passed (without the root), the tokens matched, and how many of these are of the
        last node if it was not matched to its end (else 0). The usual edge matches whole, which one
        comparison of memory tells; only the last one is compared token by token.
        """
        raw = keys.tobytes()
        key_at = page_keys(raw, self.page_size)
        path: list[Node] = []
        at = 0
        node = root
        while at < len(keys) and node.children:
            child = node.children.get(key_at(at))
            if child is None:
                break
            edge = child.data[0]
            if not raw.startswith(edge.tobytes(), TOKEN_BYTES * at):
                same = common_prefix(edge, keys, at)
                same -= same % self.page_size
                if same:  # else it is another page with the same hash
                    path.append(child)
                return path, at + same, same
            path.append(child)
            at += len(edge)
            node = child
        return path, at, 0

    def _use(self, path: list[Node], now: int, hits: int) -> None:
        """Deepest first, so that an ancestor is never less recently used than its descendants."""
        for node in reversed(path):
            node.stamp = now
            node.hits += hits
            if node.locks == 0:
                self.policy.touch(node)

    def _has_room(self, parent: Node, keys: IntArray, at: int) -> bool:
        """False where another page with the same hash stands, see ``page_keys``."""
        if self.page_size == 1 or not parent.children:
            return True
        return page_keys(keys[at:].tobytes(), self.page_size)(0) not in parent.children

    def _grow(self, parent: Node, tokens: IntArray, slots: IntArray, now: int) -> Node:
        """A new leaf under ``parent``. Call before ``_use`` of the path, which is deepest first."""
        data = np.empty((2, len(tokens)), np.int32)
        data[0] = tokens
        data[1] = slots
        leaf = Node(data, parent, now)
        if parent.children is None:
            parent.children = {}
        parent.children[node_key(leaf, self.page_size)] = leaf
        self._nodes += 1
        self._evictable += leaf.length
        self._counters.inserted_tokens += leaf.length
        self.policy.add(leaf)
        return leaf

    def _split(self, lower: Node, at: int) -> Node:
        """Cut an edge after ``at`` tokens, 0 < at < length. Returns the new upper node.

        The given object becomes the lower part: whoever holds it means the place where it ends. The upper
        part gets the same count of locks, all of which are below it, so it holds none itself.
        """
        parent = lower.parent
        assert parent is not None
        assert parent.children is not None
        upper_data, lower_data = cut(lower.data, at)
        upper = Node(upper_data, parent, lower.born)
        parent.children[node_key(lower, self.page_size)] = upper
        lower.data = lower_data
        lower.parent = upper
        upper.children = {node_key(lower, self.page_size): lower}
        upper.locks = lower.locks
        upper.stamp = lower.stamp
        upper.hits = lower.hits
        self._nodes += 1
        self._counters.splits += 1
        if not upper.locks:
            self.policy.split(upper, lower)
        return upper

    def _drop(self, top: Node, freed: list[IntArray]) -> None:
        """Take ``top`` and all below it out of the tree, locked or not; their slots are added to ``freed``.

        Dropped nodes keep their parents: through these a detached lock reaches the ancestors that survive.
        """
        parent = top.parent
        assert parent is not None
        assert parent.children is not None
        del parent.children[node_key(top, self.page_size)]
        doomed = [top]
        while doomed:
            node = doomed.pop()
            doomed.extend((node.children or {}).values())
            if node.locks:
                self._protected -= node.length
            else:
                self.policy.remove(node)
                self._evictable -= node.length
            freed.append(node.data[1])
            node.data = NO_TOKENS
            node.children = None
            self._nodes -= 1
        if not parent.children:
            parent.children = None
            if isinstance(parent, Root):
                del self._roots[parent.namespace]
            elif not parent.locks:
                self.policy.expose(parent)


def _concatenate(slots: list[IntArray]) -> IntArray:
    return np.concatenate(slots) if slots else NO_SLOTS.copy()
