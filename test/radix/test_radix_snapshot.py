"""The tree as plain data: what a snapshot shows, and how little of a large tree it looks at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from trellis.radix import Node, RadixCache
from trellis.radix import snapshot as snapshot_module


def test_a_snapshot_is_plain_data_with_parents_first() -> None:
    cache = RadixCache()
    cache.insert([1, 2, 3], [1, 2, 3], "salt")
    end = cache.insert([1, 2, 4, 5], [9, 9, 4, 5], "salt").node
    cache.lock(end)
    cache.match([1, 2, 4, 5], "salt")
    top, first, second = cache.snapshot()
    assert top == {
        "id": 0,
        "parent": None,
        "namespace": "salt",
        "depth": 0,
        "length": 2,
        "tokens": [1, 2],
        "slots": [1, 2],
        "locks": 1,
        "held": 0,
        "hits": 1,
        "last_used": 3,
        "created": 1,
        "children": 2,
    }
    assert (first["tokens"], first["parent"], first["depth"], first["held"]) == ([4, 5], 0, 2, 1)
    assert (second["tokens"], second["parent"], second["locks"]) == ([3], 0, 0)
    assert cache.snapshot(limit=1) == [top]
    assert cache.snapshot(edge_tokens=1)[0] == {**top, "tokens": [1], "slots": [1]}
    assert cache.snapshot(only=lambda namespace: namespace == "") == []


def test_a_snapshot_with_a_limit_shows_the_nodes_with_the_most_hits() -> None:
    cache = RadixCache()
    for word in range(50):
        cache.insert([word, 100, 100], [3 * word + 1, 3 * word + 2, 3 * word + 3])
    for word, hits in ((7, 3), (31, 5), (2, 1)):
        for _ in range(hits):
            cache.match([word, 100])
    shown = [(view["tokens"][0], view["hits"]) for view in cache.snapshot(limit=4)]
    assert shown == [(31, 5), (7, 3), (2, 1), (49, 0)]


def test_a_snapshot_with_a_limit_looks_at_a_bounded_part_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "LOOK_AT", 10)
    cache = RadixCache()
    for word in range(1_000):
        cache.insert([word, 5], [2 * word + 1, 2 * word + 2], namespace=str(word % 3))
    looked_at = 0

    class Counting(dict[int, Node]):
        def __reversed__(self) -> Iterator[int]:
            raise AssertionError("keys are not wanted")

        def values(self) -> Any:
            nonlocal looked_at
            outer = super().values()

            class Values:
                def __reversed__(self) -> Iterator[Node]:
                    nonlocal looked_at
                    for node in reversed(outer):
                        looked_at += 1
                        yield node

            return Values()

    for root in cache.roots:
        root.children = Counting(root.children or {})
    views = cache.snapshot(limit=8)
    assert {view["namespace"] for view in views} == {"0", "1", "2"}
    assert looked_at <= 10 + 3
