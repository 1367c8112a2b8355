"""Taking back what a failed step inserted, although it is locked."""

from __future__ import annotations

import pytest

from trellis.radix import RadixCache

PREFIX = list(range(100, 108))


def insert_locked(cache: RadixCache, tokens: list[int], first_slot: int) -> tuple[object, int]:
    inserted = cache.insert(tokens, range(first_slot, first_slot + len(tokens)))
    cache.lock(inserted.node)
    return inserted.node, inserted.existing


def test_a_failed_prompt_is_taken_back_with_all_who_follow_it() -> None:
    cache = RadixCache()
    leader, _ = insert_locked(cache, [*PREFIX, 1, 2], 1)
    follower, existing = insert_locked(cache, [*PREFIX, 3], 20)
    assert existing == len(PREFIX)
    assert sorted(cache.discard(leader, 0).tolist()) == [*range(1, 11), 28]
    cache.check()
    assert (cache.total, cache.stats()["namespaces"]) == (0, 0)
    assert cache.discard(follower, len(PREFIX)).tolist() == []
    cache.unlock(leader)
    cache.unlock(follower)
    cache.check()


@pytest.mark.parametrize("leader_first", [True, False])
def test_the_order_in_which_requests_give_up_does_not_matter(leader_first: bool) -> None:
    cache = RadixCache()
    cache.insert(PREFIX[:4], range(1, 5))  # computed long ago
    leader, _ = insert_locked(cache, PREFIX, 1)
    follower, _ = insert_locked(cache, [*PREFIX, 7], 1)
    freed: list[int] = []
    for node in (leader, follower) if leader_first else (follower, leader):
        freed += cache.discard(node, 4).tolist()
        cache.check()
        cache.unlock(node)
        cache.check()
    assert sorted(freed) == [5, 6, 7, 8, 9]
    assert (cache.protected, cache.evictable) == (0, 4)


def test_a_cut_in_the_middle_of_an_edge_keeps_what_was_computed() -> None:
    cache = RadixCache()
    node, _ = insert_locked(cache, PREFIX, 1)
    assert cache.discard(node, 5).tolist() == [6, 7, 8]
    assert cache.match(PREFIX).slots.tolist() == [1, 2, 3, 4, 5]
    cache.check()


def test_a_detached_lock_still_guards_what_survives_until_it_is_given_back() -> None:
    cache = RadixCache()
    node, _ = insert_locked(cache, PREFIX, 1)
    cache.discard(node, 5)
    assert (cache.protected, cache.evictable) == (5, 0)
    assert len(cache.evict(5)) == 0
    with pytest.raises(ValueError, match="has left the tree"):
        cache.lock(node)
    cache.unlock(node)
    cache.check()
    assert (cache.protected, cache.evictable) == (0, 5)
    with pytest.raises(ValueError, match="no lock was taken"):
        cache.unlock(node)


def test_a_detached_lock_survives_splits_and_further_cuts_of_the_rest() -> None:
    cache = RadixCache()
    node, _ = insert_locked(cache, PREFIX, 1)
    cache.discard(node, 6)
    cache.insert([*PREFIX[:2], 9], [1, 2, 50])  # splits what survived
    cache.check()
    assert cache.protected == 6
    assert cache.discard(node, 4).tolist() == [5, 6]
    assert cache.protected == 4
    cache.unlock(node)
    cache.check()
    assert sorted(cache.evict(100).tolist()) == [1, 2, 3, 4, 50]


def test_the_same_tokens_can_be_inserted_again_under_new_locks() -> None:
    cache = RadixCache()
    old, _ = insert_locked(cache, PREFIX, 1)
    cache.discard(old, 0)
    new, existing = insert_locked(cache, PREFIX, 11)
    assert existing == 0
    cache.unlock(old)
    cache.check()
    assert cache.protected == len(PREFIX)
    cache.unlock(new)
    assert cache.evictable == len(PREFIX)


def test_other_branches_stay() -> None:
    cache = RadixCache()
    cache.insert([*PREFIX[:2], 5, 6], [1, 2, 3, 4])
    node, _ = insert_locked(cache, PREFIX, 11)
    assert sorted(cache.discard(node, 2).tolist()) == [13, 14, 15, 16, 17, 18]
    assert cache.match([*PREFIX[:2], 5, 6]).length == 4
    cache.check()


def test_keep_is_rounded_down_to_pages() -> None:
    cache = RadixCache(page_size=4)
    node, _ = insert_locked(cache, PREFIX, 1)
    assert cache.discard(node, 7).tolist() == [5, 6, 7, 8]
    cache.check()


def test_nothing_beyond_the_cut_nothing_happens() -> None:
    cache = RadixCache()
    node, _ = insert_locked(cache, PREFIX, 1)
    assert len(cache.discard(node, 8)) == 0
    assert len(cache.discard(node, 99)) == 0
    assert len(cache.discard(cache.match([1]).node, 0)) == 0
    assert cache.stats()["discarded_tokens"] == 0
    with pytest.raises(ValueError, match="must not be negative"):
        cache.discard(node, -1)
