"""Atomic groups and possessive quantifiers, where they mean the same as the plain ones.

An atomic group commits to its first match. That changes nothing when, before any given rest of a text, at
most one length can lead on: the group's width is fixed; or it ends in a repeat of a fixed-width body that
no following character can start again (then every plain match has taken as many copies as there are).
"""

from __future__ import annotations

from trellis.fsm.borders import Border, Borders, joined
from trellis.fsm.charset import EVERYTHING, Ranges, intersect, union
from trellis.fsm.syntax import INF, Alt, Atomic, Builder, Cat, Chars, Look, Node, Rep


def resolve(node: Node, build: Builder) -> Node | None:
    """The tree without atomic groups, or None where one of them is not equal to its plain form."""
    return _Resolving(build).resolved(node, ())


class _Resolving:
    def __init__(self, build: Builder) -> None:
        self._build = build
        self._borders = Borders()

    def resolved(self, node: Node, follow: Ranges) -> Node | None:
        """follow: every character that can come after this node."""
        if not node.atomic:
            return node
        build = self._build
        if isinstance(node, Cat):
            return self._resolved_in_a_row(node.parts, follow)
        if isinstance(node, Alt):
            branches = [self.resolved(part, follow) for part in node.parts]
            return None if None in branches else build.alt([b for b in branches if b is not None])
        if isinstance(node, Look):
            # Only whether the body matches counts, so a group at its end commits to nothing.
            body = self.resolved(_without_last(node.body, build) if node.ahead else node.body, EVERYTHING)
            return None if body is None else build.look(body, node.ahead, node.negative)
        if isinstance(node, Rep):
            again = union([self._first(node.body), follow]) if node.hi > 1 else follow
            body = self.resolved(node.body, again)
            return None if body is None else build.rep(body, node.lo, node.hi)
        assert isinstance(node, Atomic)
        body = self.resolved(node.body, follow)
        return body if body is not None and self._commits_for_free(body, follow) else None

    def _resolved_in_a_row(self, parts: tuple[Node, ...], follow: Ranges) -> Node | None:
        out: list[Node] = []
        for part in reversed(parts):
            plain = self.resolved(part, follow)
            if plain is None:
                return None
            out.append(plain)
            follow = joined(self._borders.first(part), Border(follow, True)).chars
        return self._build.cat(reversed(out))

    def _commits_for_free(self, body: Node, follow: Ranges) -> bool:
        *fixed, end = body.parts if isinstance(body, Cat) and body.parts else (body,)
        if isinstance(end, Rep) and _width(end) is None:
            if _width(end.body) in (None, 0) or intersect(self._first(end.body), follow):
                return False
        else:
            fixed.append(end)
        return all(_width(part) is not None for part in fixed)

    def _first(self, node: Node) -> Ranges:
        return self._borders.first(node).chars


def _without_last(node: Node, build: Builder) -> Node:
    """Atomic groups at the very end become plain groups."""
    if isinstance(node, Atomic):
        return _without_last(node.body, build)
    if isinstance(node, Alt):
        return build.alt([_without_last(part, build) for part in node.parts])
    if isinstance(node, Cat) and node.parts:
        return build.cat([*node.parts[:-1], _without_last(node.parts[-1], build)])
    return node


def _width(node: Node) -> int | None:
    """Characters in every text of the node, if they all have the same number."""
    if isinstance(node, Chars):
        return 1
    if isinstance(node, Cat):
        widths = [_width(part) for part in node.parts]
        return None if None in widths else sum(w for w in widths if w is not None)
    if isinstance(node, Alt):
        distinct = {_width(part) for part in node.parts}
        return distinct.pop() if len(distinct) == 1 else None
    if isinstance(node, Rep):
        width = _width(node.body)
        return width * node.lo if width is not None and node.lo == node.hi != INF else None
    return 0 if not isinstance(node, Atomic) else _width(node.body)
