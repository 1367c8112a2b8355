"""Match, insert, split, lock, evict, flush, namespaces and pages, each on a tree small enough to draw."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trellis.radix import InvariantError, Node, RadixCache
from trellis.radix import tree as tree_module


class Tree:
    """A cache that is fed with words; each token gets the next slot, and every step is checked."""

    def __init__(self, page_size: int = 1, policy: str = "lru") -> None:
        self.cache = RadixCache(page_size, policy)
        self._slots = itertools.count(1)

    def put(self, word: str, namespace: str = "") -> Node:
        slots = [next(self._slots) for _ in word]
        node = self.cache.insert([ord(c) for c in word], slots, namespace).node
        self.cache.check()
        return node

    def get(self, word: str, namespace: str = "") -> tuple[str, Node]:
        """The cached part of the word, and where it ends."""
        found = self.cache.match([ord(c) for c in word], namespace)
        self.cache.check()
        return word[: found.length], found.node

    def edges(self) -> list[str]:
        self.cache.check()
        return ["".join(map(chr, view["tokens"])) for view in self.cache.snapshot()]


def path(node: Node) -> str:
    parts = ["".join(map(chr, part.tokens)) for part in node.ancestry()]
    return "|".join(reversed(parts)).lstrip("|")


# ---- match, insert, split --------------------------------------------------------------------------------


def test_an_empty_tree_matches_nothing_and_remembers_no_question() -> None:
    tree = Tree()
    found = tree.cache.match([1, 2, 3], "anyone")
    assert (found.length, found.slots.tolist(), found.slots.dtype) == (0, [], np.int32)
    assert tree.cache.stats()["namespaces"] == 0


def test_a_match_returns_the_slots_of_the_longest_prefix() -> None:
    cache = RadixCache()
    cache.insert([5, 6, 7, 8], [10, 11, 12, 13])
    cache.insert([5, 6, 9], [20, 21, 22])
    assert cache.match([5, 6, 9, 1]).slots.tolist() == [10, 11, 22]
    assert cache.match([5, 6, 7, 8]).slots.tolist() == [10, 11, 12, 13]
    assert cache.match([6]).length == 0


def test_a_match_inside_an_edge_splits_it_there() -> None:
    tree = Tree()
    whole = tree.put("abcdef")
    found, node = tree.get("abcx")
    assert (found, path(node), path(whole)) == ("abc", "abc", "abc|def")
    assert tree.edges() == ["abc", "def"]


def test_insert_takes_only_what_is_new() -> None:
    cache = RadixCache()
    cache.insert([1, 2, 3], [1, 2, 3])
    inserted = cache.insert([1, 2, 7, 8], [91, 92, 4, 5])
    assert (inserted.existing, inserted.length) == (2, 4)
    assert cache.match([1, 2, 7, 8]).slots.tolist() == [1, 2, 4, 5]
    again = cache.insert([1, 2, 7, 8], [93, 94, 95, 96])
    assert (again.existing, again.length, again.node) == (4, 4, inserted.node)
    assert cache.total == 5
    cache.check()


def test_insert_of_a_prefix_ends_inside_the_known_edge() -> None:
    tree = Tree()
    tree.put("abcdef")
    assert path(tree.put("abc")) == "abc"
    assert tree.cache.total == 6


def test_insert_copies_and_match_copies() -> None:
    cache = RadixCache()
    tokens, slots = np.array([1, 2], np.int32), np.array([3, 4], np.int32)
    cache.insert(tokens, slots)
    tokens[:] = slots[:] = 9
    found = cache.match([1, 2])
    assert found.slots.tolist() == [3, 4]
    found.slots[:] = 9
    assert cache.match([1, 2]).slots.tolist() == [3, 4]


def test_nothing_is_inserted_for_nothing() -> None:
    cache = RadixCache()
    inserted = cache.insert([], [], "x")
    assert (inserted.existing, inserted.length, inserted.node.depth()) == (0, 0, 0)
    assert cache.stats()["namespaces"] == 0


def test_peek_measures_without_a_trace() -> None:
    tree = Tree()
    tree.put("abcdef")
    before = tree.cache.snapshot()
    assert tree.cache.peek([ord(c) for c in "abcx"]) == 3
    assert tree.cache.peek([ord(c) for c in "abcx"], "other") == 0
    assert tree.cache.snapshot() == before
    assert tree.cache.stats()["matches"] == 0


@pytest.mark.parametrize(
    ("tokens", "slots", "reason"),
    [([1, 2], [1], "2 tokens and 1 slots"), ([[1], [2]], [1, 2], "one sequence of ids")],
)
def test_malformed_input_is_refused(tokens: list[int], slots: list[int], reason: str) -> None:
    cache = RadixCache()
    with pytest.raises(ValueError, match=reason):
        cache.insert(tokens, slots)
    assert cache.total == 0


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="page_size must be at least 1"):
        RadixCache(page_size=0)
    with pytest.raises(ValueError, match="unknown eviction policy 'mru'; known are fifo, lfu, lru, slru"):
        RadixCache(policy="mru")


# ---- locks -----------------------------------------------------------------------------------------------


def test_a_lock_protects_the_path_and_nothing_else() -> None:
    tree = Tree()
    tree.put("abcd")
    end = tree.put("abxy")
    tree.cache.lock(end)
    assert (tree.cache.protected, tree.cache.evictable) == (4, 2)
    assert len(tree.cache.evict(100)) == 2
    assert tree.edges() == ["ab", "xy"]
    tree.cache.unlock(end)
    assert (tree.cache.protected, tree.cache.evictable) == (0, 4)
    tree.cache.check()


def test_a_lock_survives_splits_above_and_through_its_node() -> None:
    tree = Tree()
    end = tree.put("abcdef")
    tree.cache.lock(end)
    for word in ("abcdex", "abx", "ay"):
        tree.put(word)
    assert path(end) == "a|b|cde|f"
    assert sorted(tree.cache.evict(100).tolist()) == [12, 15, 17]  # the x, x and y of the others
    assert tree.edges() == ["a", "b", "cde", "f"]
    tree.cache.unlock(end)
    tree.cache.check()
    assert tree.cache.evictable == 6


def test_locks_are_counted() -> None:
    tree = Tree()
    end = tree.put("ab")
    tree.cache.lock(end)
    tree.cache.lock(end)
    tree.cache.unlock(end)
    assert len(tree.cache.evict(2)) == 0
    tree.cache.unlock(end)
    assert len(tree.cache.evict(2)) == 2


def test_an_unlock_without_a_lock_is_refused_even_where_others_hold_one() -> None:
    tree = Tree()
    tree.put("abcd")
    tree.cache.lock(tree.put("abxy"))
    _, middle = tree.get("ab")
    assert middle.locks == 1
    with pytest.raises(ValueError, match="no lock was taken on it"):
        tree.cache.unlock(middle)
    tree.cache.check()
    assert tree.cache.protected == 4


def test_what_was_evicted_cannot_be_locked() -> None:
    tree = Tree()
    end = tree.put("ab")
    tree.cache.evict(1)
    with pytest.raises(ValueError, match="has left the tree, match again"):
        tree.cache.lock(end)


def test_the_root_can_be_locked_before_and_after_its_namespace_exists() -> None:
    tree = Tree()
    _, nowhere = tree.get("abc")
    tree.cache.lock(nowhere)
    end = tree.put("abc")
    tree.cache.unlock(nowhere)
    _, root = tree.get("xyz")
    tree.cache.lock(root)
    assert tree.cache.protected == 0
    tree.cache.evict(3)
    tree.cache.unlock(root)
    assert not end.attached


# ---- evict, flush ----------------------------------------------------------------------------------------


def test_evict_trims_the_tail_of_the_last_leaf() -> None:
    tree = Tree()
    tree.put("abcdef")  # slots 1 to 6
    assert tree.cache.evict(2).tolist() == [5, 6]
    assert tree.get("abcdef")[0] == "abcd"
    assert tree.cache.evict(3).tolist() == [2, 3, 4]
    assert tree.cache.evict(3).tolist() == [1]
    assert tree.cache.evict(3).tolist() == []
    assert tree.cache.stats()["evicted_tokens"] == 6


def test_evict_of_nothing_frees_nothing() -> None:
    tree = Tree()
    tree.put("ab")
    assert tree.cache.evict(0).tolist() == []
    assert tree.cache.evict(-3).tolist() == []
    assert tree.cache.total == 2


def test_a_node_whose_tail_was_trimmed_no_longer_counts_as_its_old_end() -> None:
    """A node means "up to here"; here is gone, so the object is, and cannot be locked by mistake."""
    tree = Tree()
    end = tree.put("abcd")
    tree.cache.evict(1)
    assert not end.attached


def test_flush_drops_all_but_the_locked() -> None:
    tree = Tree()
    tree.put("abcd")
    tree.cache.lock(tree.put("abxy"))
    tree.put("other", "salt")
    assert len(tree.cache.flush()) == 2 + 5
    assert tree.edges() == ["ab", "xy"]
    assert tree.cache.stats()["flushed_tokens"] == 7


def test_a_long_edge_can_be_trimmed_to_nothing() -> None:
    cache = RadixCache()
    n = 600
    cache.insert(np.arange(n), np.arange(1, n + 1))
    for left in range(n - 1, -1, -1):
        assert cache.evict(1).tolist() == [left + 1]
        assert [node.length for node in cache.walk()] == [left] * (left > 0)
        cache.check()


def test_a_cut_leaves_every_other_edge_as_it_is() -> None:
    """Split, insert and evict copy the edge that they touch; all others keep the very memory they had."""
    cache = RadixCache()
    cache.insert(np.arange(100), np.arange(1, 101))
    cache.insert([*range(50), 7], np.arange(200, 251))
    cache.insert([900, 901, 902], [300, 301, 302])
    before = {id(node): (node.raw_tokens, node.raw_slots) for node in cache.walk()}
    cut = cache.match(range(80)).node
    cache.insert([900, 5], [400, 401])
    cache.evict(1)
    untouched = 0
    for node in cache.walk():
        tokens, slots = before.get(id(node), (None, None))
        untouched += tokens is node.raw_tokens and slots is node.raw_slots
    assert cut.length == 30
    assert untouched == 2  # the common half and its short child; the long child and 900 were cut


# ---- namespaces ------------------------------------------------------------------------------------------


def test_namespaces_do_not_see_each_other() -> None:
    tree = Tree()
    tree.put("abc", "one")
    assert tree.get("abc", "two")[0] == ""
    tree.put("abd", "two")
    assert tree.get("abc", "two")[0] == "ab"
    assert tree.cache.total == 6


def test_an_empty_namespace_is_dropped() -> None:
    tree = Tree()
    tree.put("abc", "one")
    tree.put("abc", "two")
    assert tree.cache.stats()["namespaces"] == 2
    tree.cache.evict(3)
    assert tree.cache.stats()["namespaces"] == 1
    assert tree.get("abc", "one")[0] == ""
    tree.cache.flush()
    assert tree.cache.stats()["namespaces"] == 0
    tree.put("abc", "one")
    assert tree.get("abc", "one")[0] == "abc"


def test_eviction_has_one_order_over_all_namespaces() -> None:
    tree = Tree()
    for word, namespace in (("a", "one"), ("b", "two"), ("c", "one")):
        tree.put(word, namespace)
    tree.get("a", "one")
    assert [int(tree.cache.evict(1)[0]) for _ in range(3)] == [2, 3, 1]


# ---- pages -----------------------------------------------------------------------------------------------


def test_only_whole_pages_are_inserted_and_matched() -> None:
    cache = RadixCache(page_size=4)
    inserted = cache.insert(range(10), range(1, 11))
    assert (inserted.existing, inserted.length, inserted.node.depth()) == (0, 8, 8)
    assert cache.match(range(7)).length == 4
    assert cache.match([0, 1, 2, 3, 4, 5, 6, 99]).length == 4
    assert cache.match([0, 1, 2]).length == 0
    cache.check()


def test_pages_that_begin_alike_are_different_children() -> None:
    cache = RadixCache(page_size=2)
    cache.insert([1, 2, 3, 4], [1, 2, 3, 4])
    inserted = cache.insert([1, 2, 3, 5], [5, 6, 7, 8])
    assert (inserted.existing, inserted.length) == (2, 4)
    assert cache.match([1, 2, 3, 5]).slots.tolist() == [1, 2, 7, 8]
    assert cache.match([1, 2, 3, 4]).slots.tolist() == [1, 2, 3, 4]
    cache.check()


def test_eviction_rounds_up_to_pages() -> None:
    cache = RadixCache(page_size=4)
    cache.insert(range(12), range(1, 13))
    assert cache.evict(5).tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    cache.check()


@pytest.mark.parametrize("page_size", [16, 64])
def test_large_pages(page_size: int) -> None:
    cache = RadixCache(page_size=page_size)
    tokens = np.arange(5 * page_size + 3)
    cache.insert(tokens, tokens + 1)
    other = tokens.copy()
    other[2 * page_size + 1] = 7_000
    inserted = cache.insert(other, other + 10_000)
    assert (inserted.existing, inserted.length) == (2 * page_size, 5 * page_size)
    assert cache.match(other).slots[2 * page_size] == 2 * page_size + 10_000
    assert len(cache.evict(1)) == page_size
    cache.check()


def test_pages_with_one_hash_are_never_mistaken_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "hash", lambda _: 7, raising=False)
    cache = RadixCache(page_size=2)
    assert cache.insert([1, 2], [1, 2]).length == 2
    declined = cache.insert([3, 4], [3, 4])
    assert (declined.existing, declined.length, declined.node.depth()) == (0, 0, 0)
    assert cache.match([3, 4]).length == 0
    assert cache.match([1, 2]).slots.tolist() == [1, 2]
    deeper = cache.insert([1, 2, 5, 6], [5, 6, 7, 8])
    assert (deeper.existing, deeper.length) == (2, 4)
    assert cache.insert([1, 2, 8, 9], [5, 6, 9, 10]).length == 2
    cache.check()


# ---- check, stats --------------------------------------------------------------------------------


def test_check_names_what_is_wrong() -> None:
    tree = Tree()
    end = tree.put("abc")
    end.raw_slots = end.raw_slots[4:8] + end.raw_slots[4:]
    end.locks = 1
    with pytest.raises(InvariantError) as caught:
        tree.cache.check()
    text = str(caught.value)
    assert "slot 2 is in the tree more than once" in text
    assert "3 evictable tokens are counted, there are 0" in text


def test_the_end_of_a_lock_is_a_use() -> None:
    now = 0
    cache = RadixCache(clock=lambda: now)
    end = cache.insert([1, 2], [1, 2]).node
    cache.lock(end)
    now = 50
    cache.unlock(end)
    assert cache.snapshot()[0]["last_used"] == 50


def test_stats_count_tokens_asked_for_and_found() -> None:
    cache = RadixCache()
    cache.insert([1, 2, 3], [1, 2, 3])
    cache.match([1, 2, 9])
    cache.match([8])
    stats = cache.stats()
    assert (stats["matches"], stats["matched_from_tokens"], stats["hit_tokens"]) == (2, 4, 2)
    assert (stats["nodes"], stats["splits"], stats["tokens"]) == (2, 1, 3)
