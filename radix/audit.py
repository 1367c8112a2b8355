"""Verification of a radix cache: recount everything and compare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from trellis.radix.tree import ITEM, UNLISTED, Node, Root, page_keys

if TYPE_CHECKING:
    from trellis.radix.cache import RadixCache


class InvariantError(RuntimeError):
    """The cache contradicts itself. ``faults`` says how, one sentence each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__(f"radix cache: {len(faults)} broken invariants: " + "; ".join(faults[:20]))
        self.faults = faults


def check_cache(cache: RadixCache) -> None:
    """Verify links, keys, counters, slot ownership, locks and the eviction order. O(tree).

    Raises InvariantError.
    """
    faults = list(_faults(cache))
    if faults:
        raise InvariantError(faults)


def _faults(cache: RadixCache) -> Iterator[str]:
    nodes = list(cache.walk())
    for root in cache.roots:
        yield from _root_faults(root)
    for node in nodes:
        yield from _node_faults(node, cache.page_size)
    for parent in [*cache.roots, *nodes]:
        yield from _link_faults(parent)
    yield from _count_faults(cache, nodes)
    yield from _slot_faults(nodes)
    yield from cache.policy.faults([node for node in nodes if node.locks == 0])


def _root_faults(root: Root) -> Iterator[str]:
    if not root.children:
        yield f"namespace {root.namespace!r} holds nothing and was not dropped"
    if root.parent is not None or root.length:
        yield f"the root of namespace {root.namespace!r} has a parent or holds tokens"


def _node_faults(node: Node, page_size: int) -> Iterator[str]:
    size = len(node.raw_tokens)
    if not size or size % (ITEM * page_size):
        yield f"{node} does not hold a positive number of whole pages of {page_size}"
    elif node.key != page_keys(node.raw_tokens, page_size)(0):
        yield f"{node} has the key {node.key}, its first page another"
    if len(node.raw_slots) != size:
        yield f"{node} has {len(node.raw_slots)} bytes of slots for {size} bytes of tokens"
    if node.locks and node.bucket != UNLISTED and node.next is not None:
        yield f"locked {node} is still in the eviction order"


def _link_faults(parent: Node) -> Iterator[str]:
    if parent.children is None:
        return
    below = 0
    for key, child in parent.children.items():
        below += child.locks
        if child.parent is not parent:
            yield f"{child} does not know its parent {parent}"
        if key != child.key:
            yield f"{child} is filed under {key}, its key is {child.key}"
        if not isinstance(parent, Root) and (parent.stamp < child.stamp or parent.hits < child.hits):
            yield f"{parent} was used less, or less recently, than its child {child}"
    if parent.held < 0 or parent.locks < parent.held + below:
        yield f"{parent} holds {parent.held} locks itself and {below} in its children, but counts fewer"


def _count_faults(cache: RadixCache, nodes: list[Node]) -> Iterator[str]:
    if len(nodes) != cache.nodes:
        yield f"{cache.nodes} nodes are counted, there are {len(nodes)}"
    evictable = sum(node.length for node in nodes if node.locks == 0)
    protected = sum(node.length for node in nodes if node.locks)
    if evictable != cache.evictable:
        yield f"{cache.evictable} evictable tokens are counted, there are {evictable}"
    if protected != cache.protected:
        yield f"{cache.protected} protected tokens are counted, there are {protected}"


def _slot_faults(nodes: list[Node]) -> Iterator[str]:
    owned = np.frombuffer(b"".join(node.raw_slots for node in nodes), np.int32)
    slots, owners = np.unique(owned, return_counts=True)
    for slot in slots[owners > 1][:5]:
        yield f"slot {slot} is in the tree more than once"
