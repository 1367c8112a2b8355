"""The tree as plain data, for pictures, debugging and the wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypedDict

from trellis.radix.tree import Node, Root


class NodeView(TypedDict):
    """One node.

    id, parent: numbers within this snapshot; parent is None under a root. depth: tokens before this node.
    tokens, slots: the edge. locks: live handles at or below; held: on this node itself.
    last_used, created: the cache's clock. children: how many there are, in this snapshot or not.
    """

    id: int
    parent: int | None
    namespace: str
    depth: int
    tokens: list[int]
    slots: list[int]
    locks: int
    held: int
    hits: int
    last_used: int
    created: int
    children: int


def view_nodes(roots: Iterable[Root], limit: int | None) -> list[NodeView]:
    """Breadth first, so that a limit keeps the top of the tree and a parent comes before its children."""
    views: list[NodeView] = []
    waiting: deque[tuple[Node, int | None, int, str]] = deque()
    for root in roots:
        waiting.extend((child, None, 0, root.namespace) for child in (root.children or {}).values())
    while waiting and (limit is None or len(views) < limit):
        node, parent, depth, namespace = waiting.popleft()
        number = len(views)
        views.append(_view(node, number, parent, depth, namespace))
        children = (node.children or {}).values()
        waiting.extend((child, number, depth + node.length, namespace) for child in children)
    return views


def _view(node: Node, number: int, parent: int | None, depth: int, namespace: str) -> NodeView:
    return NodeView(
        id=number,
        parent=parent,
        namespace=namespace,
        depth=depth,
        tokens=node.tokens.tolist(),
        slots=node.slots.tolist(),
        locks=node.locks,
        held=node.held,
        hits=node.hits,
        last_used=node.stamp,
        created=node.born,
        children=len(node.children or ()),
    )
