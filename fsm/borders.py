"""What is simple to say of the texts of a node: what they begin and end with, how long the shortest is."""

from __future__ import annotations

from dataclasses import dataclass

from trellis.fsm.charset import EVERYTHING, Ranges, union
from trellis.fsm.syntax import Alt, Atomic, Cat, Chars, Look, Mark, Node, Rep


@dataclass(frozen=True)
class Border:
    """chars: what may stand there. empty: the text may also be empty."""

    chars: Ranges
    empty: bool


ANYTHING = Border(EVERYTHING, True)
NO_TEXT = Border((), True)


def joined(outer: Border, inner: Border) -> Border:
    """The border of two texts in a row."""
    if not outer.empty or not inner.chars:
        return Border(outer.chars, outer.empty and inner.empty)
    if not outer.chars:
        return inner
    chars = outer.chars if outer.chars == inner.chars else union([outer.chars, inner.chars])
    return Border(chars, inner.empty)


class Borders:
    """Of the nodes of one builder; worked out once for each node."""

    def __init__(self) -> None:
        self._first: dict[Node, Border] = {}
        self._last: dict[Node, Border] = {}
        self._shortest: dict[Node, int] = {}

    def first(self, node: Node) -> Border:
        """What texts of the node begin with; more where assertions narrow it."""
        found = self._first.get(node)
        if found is None:
            found = self._first[node] = self._border(node, forward=True)
        return found

    def last(self, node: Node) -> Border:
        """What texts of the node end with; more where assertions narrow it."""
        found = self._last.get(node)
        if found is None:
            found = self._last[node] = self._border(node, forward=False)
        return found

    def _border(self, node: Node, forward: bool) -> Border:
        side = self.first if forward else self.last
        if isinstance(node, Chars):
            return Border(node.ranges, False)
        if isinstance(node, Alt):
            found = [side(part) for part in node.parts]
            return Border(union(border.chars for border in found), any(border.empty for border in found))
        if isinstance(node, Cat):
            text = NO_TEXT
            for part in node.parts if forward else reversed(node.parts):
                text = joined(text, side(part))
                if not text.empty:
                    break
            return text
        if isinstance(node, Atomic):
            return side(node.body)
        if isinstance(node, Rep):
            border = side(node.body)
            return Border(border.chars, border.empty or node.lo == 0)
        assert isinstance(node, (Look, Mark))
        return NO_TEXT

    def shortest(self, node: Node) -> int:
        """Characters of the shortest text, leaving assertions aside."""
        found = self._shortest.get(node)
        if found is None:
            found = 0
            if isinstance(node, Chars):
                found = 1
            elif isinstance(node, Cat):
                found = sum(map(self.shortest, node.parts))
            elif isinstance(node, Alt):
                found = min(map(self.shortest, node.parts), default=0)
            elif isinstance(node, Rep):
                found = node.lo and node.lo * self.shortest(node.body)
            elif isinstance(node, Atomic):
                found = self.shortest(node.body)
            self._shortest[node] = found
        return found
