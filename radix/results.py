"""What the operations of the cache answer and count."""

from __future__ import annotations

from dataclasses import dataclass

from trellis.radix.tree import IntArray, Node


@dataclass(frozen=True)
class Match:
    """The longest cached prefix.

    length: tokens of it, whole pages. slots: int32 [length], a copy. node: where it ends (a root for 0).
    Unless ``node`` is locked, all of it holds only until the next ``evict``, ``flush`` or ``discard``.
    """

    length: int
    slots: IntArray
    node: Node


@dataclass(frozen=True)
class Inserted:
    """What the tree holds of a sequence after ``insert``.

    node: where it ends. length: tokens that the tree covers, whole pages; the tail beyond is not cached.
    existing: leading tokens that were in the tree before. The tree now owns ``slots[existing:length]``;
    the caller still owns ``slots[:existing]`` (where they are not the tree's own) and ``slots[length:]``.
    """

    node: Node
    existing: int
    length: int


@dataclass
class Counters:
    """Totals since the start. Inserted - evicted - discarded - flushed tokens = tokens in the tree."""

    matches: int = 0
    matched_from_tokens: int = 0
    hit_tokens: int = 0
    inserted_tokens: int = 0
    evicted_tokens: int = 0
    evicted_nodes: int = 0
    discarded_tokens: int = 0
    flushed_tokens: int = 0
    splits: int = 0
