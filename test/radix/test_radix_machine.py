"""Random operations on the tree against a naive model, with every invariant checked after each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trellis.radix import Node, RadixCache, make_pool

Prefix = tuple[str, tuple[int, ...]]  # namespace, tokens: whole pages
POOL_SIZE = 28

sequences = st.lists(st.integers(0, 2), min_size=0, max_size=12).map(tuple)
namespaces = st.sampled_from(["", "salt"])


@dataclass
class Cached:
    """What the model knows of one cached page: the last of the prefix it is filed under."""

    slots: list[int]
    born: int
    stamp: int
    hits: int = 0


@dataclass
class Handle:
    """A live lock. alive: how much of its prefix has never been discarded since."""

    node: Node
    namespace: str
    tokens: tuple[int, ...]
    alive: int

    def protects(self, prefix: Prefix) -> bool:
        namespace, tokens = prefix
        n = len(tokens)
        return namespace == self.namespace and n <= self.alive and self.tokens[:n] == tokens


ORDER: dict[str, Callable[[Cached], tuple[int, ...]]] = {
    "lru": lambda page: (page.stamp,),
    "lfu": lambda page: (page.hits, page.stamp),
    "fifo": lambda page: (page.born,),
}


class RadixMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["lru", "lfu", "slru", "fifo"]), page=st.sampled_from([1, 2, 3, 4]))
    def start(self, policy: str, page: int) -> None:
        self.policy, self.page = policy, page
        self.cache = RadixCache(page_size=page, policy=policy)
        self.pool = make_pool(self.whole(POOL_SIZE), page)
        self.private: list[int] = []
        self.model: dict[Prefix, Cached] = {}
        self.handles: list[Handle] = []
        self.now = 0

    # ---- the model -----------------------------------------------------------------------------------

    def whole(self, n: int) -> int:
        return n - n % self.page

    def pages(self, namespace: str, tokens: tuple[int, ...]) -> list[Prefix]:
        ends = range(self.page, len(tokens) + 1, self.page)
        return [(namespace, tokens[:end]) for end in ends]

    def cached_length(self, namespace: str, tokens: tuple[int, ...]) -> int:
        """By closure under prefixes, the cached pages are the first ones."""
        return self.page * sum(prefix in self.model for prefix in self.pages(namespace, tokens))

    def is_protected(self, prefix: Prefix) -> bool:
        return any(handle.protects(prefix) for handle in self.handles)

    def unlocked_tokens(self) -> int:
        return self.page * sum(not self.is_protected(prefix) for prefix in self.model)

    def use(self, namespace: str, tokens: tuple[int, ...], hits: int = 0) -> None:
        self.now += 1
        for prefix in self.pages(namespace, tokens):
            self.model[prefix].stamp = self.now
            self.model[prefix].hits += hits

    def forget(self, slots: np.ndarray, among: Callable[[Prefix], bool]) -> None:
        """The tree gave up these slots: they must be whole pages of the allowed ones, ends first."""
        gone = set(slots.tolist())
        prefixes = [prefix for prefix, page in self.model.items() if gone.issuperset(page.slots)]
        assert len(gone) == len(slots) == self.page * len(prefixes)
        assert all(among(prefix) for prefix in prefixes)
        for prefix in prefixes:
            del self.model[prefix]
        for namespace, tokens in self.model:
            assert all(before in self.model for before in self.pages(namespace, tokens))
        self.pool.release(slots)

    def expected_victims(self, n: int) -> set[int]:
        """Slots of the pages that go: one by one, of those that end a prefix the first in the order."""
        left = {prefix: page for prefix, page in self.model.items() if not self.is_protected(prefix)}
        freed: set[int] = set()
        while len(freed) < n and left:
            inner = {(namespace, tokens[: -self.page]) for namespace, tokens in left}
            ends = [prefix for prefix in left if prefix not in inner]
            victim = min(ends, key=lambda prefix: ORDER[self.policy](left[prefix]))
            freed.update(left.pop(victim).slots)
        return freed

    def in_pages(self, n: int) -> int:
        return n + -n % self.page

    # ---- helpers that drive the real thing -------------------------------------------------------------

    def do_match(self, namespace: str, tokens: tuple[int, ...]) -> tuple[int, np.ndarray, Node]:
        expected = self.cached_length(namespace, tokens)
        assert self.cache.peek(tokens, namespace) == expected
        found = self.cache.match(np.array(tokens, np.int32), namespace)
        self.use(namespace, tokens[:expected], hits=1)
        assert found.length == expected == found.node.depth()
        pages = [self.model[prefix].slots for prefix in self.pages(namespace, tokens[:expected])]
        assert found.slots.tolist() == [slot for page in pages for slot in page]
        return found.length, found.slots, found.node

    def do_insert(self, namespace: str, tokens: tuple[int, ...], slots: np.ndarray) -> Node:
        existing, length = self.cached_length(namespace, tokens), self.whole(len(tokens))
        self.use(namespace, tokens[:existing])
        for prefix in self.pages(namespace, tokens)[existing // self.page :]:
            end = len(prefix[1])
            self.model[prefix] = Cached(slots[end - self.page : end].tolist(), self.now, self.now)
        inserted = self.cache.insert(np.array(tokens, np.int32), slots, namespace)
        assert (inserted.existing, inserted.length) == (existing, length)
        assert inserted.node.depth() == length
        slots[:] = 0  # the tree must have copied them
        return inserted.node

    def do_lock(self, node: Node, namespace: str, tokens: tuple[int, ...]) -> None:
        self.cache.lock(node)
        self.handles.append(Handle(node, namespace, tokens, len(tokens)))

    def do_unlock(self, handle: Handle) -> None:
        self.handles.remove(handle)
        self.cache.unlock(handle.node)
        self.use(handle.namespace, handle.tokens[: handle.alive])

    def do_evict(self, n: int) -> None:
        unlocked = self.unlocked_tokens()
        expected = self.expected_victims(n) if self.policy in ORDER else None
        freed = self.cache.evict(n)
        assert len(freed) == min(n + -n % self.page, unlocked)
        if expected is not None:
            assert set(freed.tolist()) == expected
        self.forget(freed, among=lambda prefix: not self.is_protected(prefix))

    # ---- operations ------------------------------------------------------------------------------------

    @rule(namespace=namespaces, tokens=sequences)
    def match(self, namespace: str, tokens: tuple[int, ...]) -> None:
        self.do_match(namespace, tokens)

    @rule(namespace=namespaces, tokens=sequences, keep_lock=st.booleans())
    def admit(self, namespace: str, tokens: tuple[int, ...], keep_lock: bool) -> None:
        """As a scheduler does it: match, lock, make room, insert, hold the end."""
        length, slots, node = self.do_match(namespace, tokens)
        self.do_lock(node, namespace, tokens[:length])
        before = self.handles[-1]
        need = self.in_pages(len(tokens) - length)
        if need > self.pool.free:
            self.do_evict(need - self.pool.free)
        fresh = self.pool.alloc(need)
        if fresh is not None:
            end = self.do_insert(namespace, tokens, np.concatenate([slots, fresh])[: len(tokens)])
            covered = self.whole(len(tokens))
            self.pool.release(fresh[covered - length :])
            if keep_lock:
                self.do_lock(end, namespace, tokens[:covered])
        self.do_unlock(before)

    @rule(namespace=namespaces, tokens=sequences)
    def insert_duplicates(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """A request that computed everything itself: what was there already stays the caller's."""
        slots = self.pool.alloc(self.in_pages(len(tokens)))
        if slots is None:
            return
        existing, covered = self.cached_length(namespace, tokens), self.whole(len(tokens))
        self.do_insert(namespace, tokens, slots[: len(tokens)].copy())
        self.pool.release(np.concatenate([slots[:existing], slots[covered:]]))

    @rule(namespace=namespaces, tokens=sequences)
    def lock_prefix(self, namespace: str, tokens: tuple[int, ...]) -> None:
        length, _, node = self.do_match(namespace, tokens)
        self.do_lock(node, namespace, tokens[:length])

    @precondition(lambda self: self.handles)
    @rule(index=st.integers(0, 100))
    def unlock(self, index: int) -> None:
        self.do_unlock(self.handles[index % len(self.handles)])

    @precondition(lambda self: self.handles)
    @rule(index=st.integers(0, 100))
    def unlock_all_of_a_node_and_once_more(self, index: int) -> None:
        node = self.handles[index % len(self.handles)].node
        for handle in [handle for handle in self.handles if handle.node is node]:
            self.do_unlock(handle)
        with pytest.raises(ValueError, match="no lock was taken"):
            self.cache.unlock(node)

    @rule(n=st.integers(0, POOL_SIZE))
    def evict(self, n: int) -> None:
        self.do_evict(n)

    @precondition(lambda self: self.handles)
    @rule(index=st.integers(0, 100), keep=st.integers(0, 12))
    def discard(self, index: int, keep: int) -> None:
        """A step failed: what this request inserted beyond ``keep`` was not computed."""
        failed = self.handles[index % len(self.handles)]
        freed = self.cache.discard(failed.node, keep)
        keep = self.whole(keep)
        first_lost = failed.tokens[: keep + self.page]
        if failed.alive <= keep:
            assert len(freed) == 0
            return

        def is_beyond(prefix: Prefix) -> bool:
            return prefix[0] == failed.namespace and prefix[1][: keep + self.page] == first_lost

        assert len(freed) == self.page * sum(map(is_beyond, self.model))
        self.forget(freed, among=is_beyond)
        for handle in self.handles:
            if is_beyond((handle.namespace, handle.tokens[: handle.alive])):
                handle.alive = keep

    @precondition(lambda self: any(not handle.node.attached for handle in self.handles))
    @rule()
    def lock_what_is_gone(self) -> None:
        for handle in self.handles:
            if not handle.node.attached:
                with pytest.raises(ValueError, match="match again"):
                    self.cache.lock(handle.node)

    @rule()
    def flush(self) -> None:
        unlocked = self.unlocked_tokens()
        freed = self.cache.flush()
        assert len(freed) == unlocked
        self.forget(freed, among=lambda prefix: not self.is_protected(prefix))

    @rule(n=st.integers(0, 6))
    def take_private(self, n: int) -> None:
        slots = self.pool.alloc(n * self.page)
        if slots is not None:
            self.private.extend(slots.tolist())

    @rule()
    def give_private_back(self) -> None:
        self.pool.release(np.array(self.private, np.int32))
        self.private.clear()

    # ---- what must hold after each ---------------------------------------------------------------------

    @invariant()
    def the_tree_is_sound(self) -> None:
        self.cache.check()
        stats = self.cache.stats()
        gone = stats["evicted_tokens"] + stats["discarded_tokens"] + stats["flushed_tokens"]
        assert stats["inserted_tokens"] - gone == self.cache.total

    @invariant()
    def the_tree_equals_the_model(self) -> None:
        found: dict[Prefix, list[int]] = {}
        ends: list[Prefix] = []
        for view in self.cache.snapshot():
            begin = () if view["parent"] is None else ends[view["parent"]][1]
            assert len(begin) == view["depth"]
            for at in range(0, len(view["tokens"]), self.page):
                upto = at + self.page
                prefix = (view["namespace"], (*begin, *view["tokens"][:upto]))
                found[prefix] = view["slots"][at:upto]
            ends.append(prefix)
            assert view["locks"] == sum(handle.protects(prefix) for handle in self.handles)
        assert found == {prefix: page.slots for prefix, page in self.model.items()}
        assert self.cache.protected == self.page * sum(map(self.is_protected, self.model))

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        assert self.pool.free + self.cache.total + len(self.private) == self.pool.size
        owned = [slot for page in self.model.values() for slot in page.slots] + self.private
        assert sorted(owned) == self.pool.in_use().tolist()


RadixMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRadixMachine = RadixMachine.TestCase
