"""The order of eviction under each policy, and the work it takes to keep and use that order."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis.radix import POLICIES, HeapPolicy, Node, RadixCache
from trellis.radix.policies import LFU, SLRU


def filled(policy: str, words: int = 4) -> RadixCache:
    """Words 0, 1, 2 ... of two tokens each, inserted in this order; the slot of a token is its number + 1."""
    cache = RadixCache(policy=policy)
    for word in range(words):
        cache.insert([10 * word, 10 * word + 1], [10 * word + 1, 10 * word + 2])
    return cache


def use(cache: RadixCache, *words: int) -> None:
    for word in words:
        assert cache.match([10 * word, 10 * word + 1]).length == 2


def order_of_eviction(cache: RadixCache) -> list[int]:
    order = []
    while cache.evictable:
        order.append(int(cache.evict(2)[0]) // 10)
        cache.check()
    return order


def test_lru_goes_by_last_use() -> None:
    cache = filled("lru")
    use(cache, 1, 0, 1)
    assert order_of_eviction(cache) == [2, 3, 0, 1]


def test_lru_counts_an_insert_and_the_end_of_a_lock_as_a_use() -> None:
    cache = filled("lru")
    node = cache.match([0, 1]).node
    cache.lock(node)
    use(cache, 1)
    cache.insert([20, 21], [91, 92])
    cache.unlock(node)
    assert order_of_eviction(cache) == [3, 1, 2, 0]


def test_fifo_goes_by_insertion_whatever_is_used_or_locked_between() -> None:
    cache = filled("fifo")
    node = cache.match([0, 1]).node
    cache.lock(node)
    use(cache, 1, 2)
    assert cache.evict(2).tolist() == [11, 12]
    cache.unlock(node)
    assert order_of_eviction(cache) == [0, 2, 3]


def test_lfu_goes_by_hits_then_by_last_use() -> None:
    cache = filled("lfu")
    use(cache, 0, 0, 2, 3, 1)
    assert order_of_eviction(cache) == [2, 3, 1, 0]


def test_slru_lets_one_off_prompts_go_first() -> None:
    cache = filled("slru", 5)
    use(cache, 0, 1)
    assert order_of_eviction(cache) == [2, 3, 4, 0, 1]


def test_slru_does_not_protect_for_ever() -> None:
    """Of ten words that were all popular once, the oldest give way; what is hit again stays."""
    cache = filled("slru", 10)
    use(cache, *range(10))
    assert cache.evict(2).tolist() == [1, 2]
    use(cache, 1)
    assert order_of_eviction(cache)[-1] == 1


def test_slru_checks_its_share() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        SLRU(protected_share=1.5)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_children_go_before_their_parents(policy: str) -> None:
    cache = RadixCache(policy=policy)
    cache.insert([1, 2, 3], [1, 2, 3])
    cache.insert([1, 2, 4], [9, 9, 4])
    cache.insert([1, 5], [9, 5])
    order = [int(cache.evict(1)[0]) for _ in range(5)]
    assert order[-1] == 1
    assert order.index(2) > max(order.index(3), order.index(4))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_eviction_looks_at_victims_not_at_the_tree(policy: str) -> None:
    """3,000 leaves, some used, some locked: to evict 50 of them looks at about 50 nodes."""
    cache = RadixCache(policy=policy)
    leaves = []
    for i in range(3_000):
        leaves.append(cache.insert([i % 50, i, 7], [3 * i + 1, 3 * i + 2, 3 * i + 3]).node)
    for i in range(0, 3_000, 7):
        cache.match([i % 50, i, 7])
    for leaf in leaves[:20]:
        cache.lock(leaf)
    before = cache.policy.visits
    evicted_nodes = cache.stats()["evicted_nodes"]
    assert len(cache.evict(100)) == 100
    evicted_nodes = cache.stats()["evicted_nodes"] - evicted_nodes
    assert evicted_nodes <= 50
    assert cache.policy.visits - before <= evicted_nodes * (1 + SLRU.DEMOTIONS) + 20
    cache.check()


def test_a_popular_node_leaves_no_trail_in_lfu() -> None:
    """Each hit opens a bucket and empties one: what is kept is bounded by the buckets in use."""
    policy = LFU()
    cache = RadixCache(policy=policy)
    cache.insert([1], [1])
    cache.insert([2], [2])
    for _ in range(5_000):
        cache.match([1])
    assert len(policy._buckets) == 2
    assert len(policy._numbers) <= 2 * 2 + policy.SLACK
    cache.check()


def test_the_order_stays_small_when_all_that_filled_it_is_locked() -> None:
    cache = RadixCache(policy="lru")
    node = cache.insert([1], [1]).node
    for _ in range(500):
        cache.lock(node)
        cache.check()
        cache.unlock(node)
        cache.check()
    assert cache.evict(1).tolist() == [1]


def test_a_heap_keeps_no_more_stale_entries_than_live_ones() -> None:
    cache = RadixCache(policy="fifo")
    policy = cache.policy
    assert isinstance(policy, HeapPolicy)
    for i in range(2_000):
        node = cache.insert([i, i], [2 * i + 1, 2 * i + 2]).node
        if i % 10:
            cache.discard(node, 0)
        assert len(policy._heap) + len(policy._queue) <= 2 * cache.nodes + policy.SLACK
    assert order_of_eviction_is_ascending(cache)


def order_of_eviction_is_ascending(cache: RadixCache) -> bool:
    slots = [int(cache.evict(2)[0]) for _ in range(cache.nodes)]
    return slots == sorted(slots)


class HitsPerToken(HeapPolicy):
    """A policy of one's own: the more it was hit per token, the longer it stays."""

    name = "hits-per-token"

    def key_of(self, node: Node) -> int:
        return node.hits * 1000 // max(node.depth(), 1)


def test_a_policy_of_ones_own_needs_only_a_key() -> None:
    cache = RadixCache(policy=HitsPerToken())
    cache.insert(np.arange(10), np.arange(1, 11))
    cache.insert([50, 51], [50, 51])
    cache.insert([60, 61], [60, 61])
    for _ in range(2):
        cache.match(np.arange(10))
        cache.match([50, 51])
    assert cache.evict(2).tolist() == [60, 61]
    cache.check()
    assert cache.evict(1).tolist() == [10]
    assert cache.evictable == 11


# ---- against naive models --------------------------------------------------------------------------------


class NaiveSLRU:
    """Words in two plain lists, oldest first; all that the policy keeps in linked lists, spelled out."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.probation: list[int] = []
        self.protected: list[int] = []

    def insert(self, word: int) -> None:
        home = self.protected if word in self.protected else self.probation
        if word in home:
            home.remove(word)
        home.append(word)

    def hit(self, word: int) -> None:
        for home in (self.probation, self.protected):
            if word in home:
                home.remove(word)
                self.protected.append(word)
                return

    def evict(self) -> int:
        for _ in range(SLRU.DEMOTIONS):
            if len(self.protected) <= self.share * (len(self.protected) + len(self.probation)):
                break
            self.probation.append(self.protected.pop(0))
        return (self.probation or self.protected).pop(0)


@settings(max_examples=150, deadline=None)
@given(
    share=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    steps=st.lists(st.tuples(st.sampled_from("iihhe"), st.integers(0, 12)), max_size=80),
)
def test_slru_does_what_two_lists_do(share: float, steps: list[tuple[str, int]]) -> None:
    cache, model = RadixCache(policy=SLRU(share)), NaiveSLRU(share)
    for what, word in steps:
        if what == "i":
            cache.insert([10 * word], [word + 1])
            model.insert(word)
        elif what == "h":
            cache.match([10 * word])
            model.hit(word)
        elif cache.nodes:
            assert cache.evict(1).tolist() == [model.evict() + 1]
        cache.check()


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> Iterator[weakref.WeakSet[Node]]:
    """The nodes that trees made since and that are not freed, while the cyclic collector does nothing."""
    seen: weakref.WeakSet[Node] = weakref.WeakSet()

    class Watched(Node):
        __slots__ = ("__weakref__",)

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            seen.add(self)

    monkeypatch.setattr("trellis.radix.tree.Node", Watched)
    monkeypatch.setattr("trellis.radix.cache.Node", Watched)
    gc.disable()
    yield seen
    gc.enable()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_tree_leaves_nothing_to_the_cyclic_collector(policy: str, living: weakref.WeakSet[Node]) -> None:
    """What is evicted, discarded or flushed is freed at once, although nodes refer to each other."""
    cache = RadixCache(policy=policy)
    for i in range(300):
        node = cache.insert([i % 7, i % 20, i], [3 * i + 1, 3 * i + 2, 3 * i + 3]).node
        cache.match([i % 7, i % 20, i])
        if i % 9 == 0:
            cache.lock(node)
            cache.unlock(node)
        if i % 10 == 0:
            cache.discard(node, 1)
    cache.evict(100)
    del node
    locked = cache.match([1]).node
    cache.lock(locked)
    cache.flush()
    assert set(living) == set(cache.walk()) == {locked}
    cache.unlock(locked)
    del locked
    cache.flush()
    assert not living
