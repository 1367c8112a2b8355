"""The union tree of a trace: every piece of text that calls share or not, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from benchmark.scheduling.trace import Call, IntArray, Trace

Use = Literal["reusable", "computed", "generated"]


@dataclass(eq=False)
class Edge:
    """A run of tokens that every call has either whole or not at all."""

    tokens: IntArray
    children: dict[int, Edge] = field(default_factory=dict)
    index: int = -1


@dataclass(frozen=True)
class Union:
    """paths: for each call, the (edge, use) of its prompt and output, from the root on; lengths: tokens of each edge.

    A call finds an edge's tokens in the cache or computes them (``reusable``), has to compute them for their logits
    (``computed``), or makes them (``generated``).
    """

    lengths: list[int]
    paths: list[list[tuple[int, Use]]]

    @property
    def working_set(self) -> int:
        """Distinct tokens of all prompts and outputs: slots that hold everything the trace ever has."""
        return sum(self.lengths)

    def tokens(self, call: int) -> int:
        """Slots that the call has when it ends."""
        return sum(self.lengths[edge] for edge, _ in self.paths[call])


def unite(trace: Trace) -> Union:
    """O(tokens)."""
    root = Edge(trace.calls[0].prompt[:0])
    for call in trace.calls:
        for end in (len(call.prompt) + len(call.output), len(call.prompt), call.reusable):
            _insert(root, call.computed[:end])
    lengths: list[int] = []
    paths = [_path(root, call, lengths) for call in trace.calls]
    return Union(lengths, paths)


def _insert(root: Edge, tokens: IntArray) -> None:
    """Make the tree have an edge that ends where tokens do."""
    node, at = root, 0
    while at < len(tokens):
        child = node.children.get(int(tokens[at]))
        if child is None:
            node.children[int(tokens[at])] = Edge(tokens[at:])
            return
        same = _common_prefix(child.tokens, tokens[at:])
        if same < len(child.tokens):
            upper = Edge(child.tokens[:same])
            node.children[int(tokens[at])] = upper
            child.tokens = child.tokens[same:]
            upper.children[int(child.tokens[0])] = child
            child = upper
        node, at = child, at + same


def _path(root: Edge, call: Call, lengths: list[int]) -> list[tuple[int, Use]]:
    tokens, path, node, at = call.computed, [], root, 0
    while at < len(tokens):
        node = node.children[int(tokens[at])]
        at += len(node.tokens)
        if node.index < 0:
            node.index = len(lengths)
            lengths.append(len(node.tokens))
        use: Use = "generated"
        if at <= len(call.prompt):
            use = "reusable" if at <= call.reusable else "computed"
        path.append((node.index, use))
    return path


def _common_prefix(one: IntArray, other: IntArray) -> int:
    n = min(len(one), len(other))
    different = np.flatnonzero(one[:n] != other[:n])
    return int(different[0]) if len(different) else n
