r"""Anchors and word boundaries as assertions about what stands before and after; assertions that are constant.

``$`` is ``(?=\n?\Z)`` and ``\Z`` is ``(?![\s\S])``, so an automaton has to know look-around only. Many assertions
are settled by their neighbours in the tree: those in ``\b\w+\b``, say, always hold.
"""

from __future__ import annotations

import re

from trellis.fsm.borders import ANYTHING, NO_TEXT, Border, Borders, joined
from trellis.fsm.charset import EVERYTHING, Ranges, intersect, single
from trellis.fsm.syntax import Alt, Builder, Cat, Chars, Look, MarkKind, Node, Rep


def of_mark(kind: MarkKind, build: Builder) -> Node:
    """An anchor as assertions."""
    every, newline = build.chars(EVERYTHING), build.chars(single(10))
    if kind in ("begin", "line_begin"):
        start = build.look(every, ahead=False, negative=True)
        after = build.look(newline, ahead=False, negative=False)
        return build.alt([start, after]) if kind == "line_begin" else start
    end = build.look(every, ahead=True, negative=True)
    if kind == "end":
        return end
    rest = newline if kind == "line_end" else build.cat([newline, end])
    return build.alt([end, build.look(rest, ahead=True, negative=False)])


def boundary(word: Ranges, build: Builder, negative: bool) -> Node:
    r"""``\b``, or ``\B`` if negative. word: the characters of words."""

    def side(ahead: bool, inside: bool) -> Node:
        return build.look(build.chars(word), ahead, negative=not inside)

    def both(before: bool, after: bool) -> Node:
        return build.cat([side(False, before), side(True, after)])

    if not negative:
        return build.alt([both(True, False), both(False, True)])
    outside = both(False, False)
    if re.fullmatch(r"\B", "") is None:  # before Python 3.14 an empty text has neither \b nor \B
        every = build.chars(EVERYTHING)
        some = [build.look(every, ahead, negative=False) for ahead in (False, True)]
        outside = build.cat([outside, build.alt(some)])
    return build.alt([both(True, True), outside])


def settle(root: Node, build: Builder) -> Node:
    """The same language; assertions that always or never hold where they stand are resolved."""
    return _Settling(build).settled(root, NO_TEXT, NO_TEXT)


class _Settling:
    def __init__(self, build: Builder) -> None:
        self._build = build
        self._borders = Borders()

    def settled(self, node: Node, before: Border, after: Border) -> Node:
        """before, after: what may stand on each side; ``empty`` if the text may begin or end there."""
        if not node.looks:
            return node
        if isinstance(node, Look):
            return self._look(node, before, after)
        if isinstance(node, Alt):
            return self._build.alt([self.settled(part, before, after) for part in node.parts])
        if isinstance(node, Rep):
            if node.hi > 1:
                before = after = ANYTHING
            return self._build.rep(self.settled(node.body, before, after), node.lo, node.hi)
        assert isinstance(node, Cat)
        rights = [after]  # of each part from the end
        for part in node.parts[:0:-1]:
            rights.append(joined(self._borders.first(part), rights[-1]))
        parts: list[Node] = []
        for part, right in zip(node.parts, reversed(rights), strict=True):
            parts.append(self.settled(part, before, right))
            before = joined(self._borders.last(parts[-1]), before)
        return self._build.cat(parts)

    def _look(self, look: Look, before: Border, after: Border) -> Node:
        """Decided if no character that can stand there fits, or if every one does."""
        build = self._build
        if look.ahead:
            body = self.settled(look.body, before, ANYTHING)
            side, wanted = after, self._borders.first(body)
        else:
            body = self.settled(look.body, ANYTHING, after)
            side, wanted = before, self._borders.last(body)
        met = intersect(side.chars, wanted.chars)
        if not met and not wanted.empty:
            return build.empty_text if look.negative else build.nothing
        if isinstance(body, Chars) and not side.empty and met == side.chars:
            return build.nothing if look.negative else build.empty_text
        return build.look(body, look.ahead, look.negative)
