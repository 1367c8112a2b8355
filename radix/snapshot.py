"""The tree as plain data, for pictures, debugging and the wire."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypedDict

import numpy as np

from trellis.radix.tree import ITEM, Node, Root

LOOK_AT = 2_000  # nodes that a snapshot with a limit looks at, besides those that it shows


class NodeView(TypedDict):
    """One node.

    id, parent: numbers within this snapshot; parent is None under a root. depth: tokens before this node.
    length: tokens of the edge; tokens, slots: the first of them, as many as were asked for.
    locks: live handles at or below; held: on this node itself. last_used, created: the cache's clock.
    children: how many there are, in this snapshot or not.
    """

    id: int
    parent: int | None
    namespace: str
    depth: int
    length: int
    tokens: list[int]
    slots: list[int]
    locks: int
    held: int
    hits: int
    last_used: float
    created: float
    children: int


class _Frontier:
    """Nodes that can be shown next, as their parents are: most hits first, then most recently used.

    A parent has at least the hits of its children and was used no earlier, so the best of all nodes come out
    in this order. Of very many children the newest are looked at, until ``patience`` is used up.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._heap: list[tuple[int, float, int, Node, int | None, int, str]] = []
        self._pushed = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, parent: Node, number: int | None, depth: int, namespace: str) -> None:
        children = parent.children or {}
        newest: Iterable[Node] = reversed(children.values())
        if self._patience < len(children):
            newest = islice(newest, max(1, int(self._patience)))
        for child in newest:
            self._pushed += 1
            entry = (-child.hits, -child.stamp, self._pushed, child, number, depth, namespace)
            heapq.heappush(self._heap, entry)
        self._patience -= len(children)

    def pop(self) -> tuple[Node, int | None, int, str]:
        return heapq.heappop(self._heap)[3:]


def view_nodes(
    roots: Iterable[Root],
    limit: int | None,
    edge_tokens: int | None,
    only: Callable[[str], bool] | None,
) -> list[NodeView]:
    """The ``limit`` nodes with the most hits, parents before their children; see ``RadixCache.snapshot``."""
    frontier = _Frontier(float("inf") if limit is None else LOOK_AT)
    for root in islice(roots, None if limit is None else LOOK_AT):
        if only is None or only(root.namespace):
            frontier.add(root, None, 0, root.namespace)
    views: list[NodeView] = []
    while frontier and (limit is None or len(views) < limit):
        node, parent, depth, namespace = frontier.pop()
        number = len(views)
        views.append(_view(node, number, parent, depth, namespace, edge_tokens))
        frontier.add(node, number, depth + node.length, namespace)
    return views


def _view(
    node: Node, number: int, parent: int | None, depth: int, namespace: str, edge_tokens: int | None
) -> NodeView:
    end = None if edge_tokens is None else ITEM * edge_tokens
    return NodeView(
        id=number,
        parent=parent,
        namespace=namespace,
        depth=depth,
        length=node.length,
        tokens=_numbers(node.raw_tokens[:end]),
        slots=_numbers(node.raw_slots[:end]),
        locks=node.locks,
        held=node.held,
        hits=node.hits,
        last_used=node.stamp,
        created=node.born,
        children=len(node.children or ()),
    )


def _numbers(raw: bytes) -> list[int]:
    values: list[int] = np.frombuffer(raw, np.int32).tolist()
    return values
