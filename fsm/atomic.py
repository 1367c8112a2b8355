"""Atomic groups and possessive quantifiers, where they mean the same as the plain ones.

An atomic group commits to its first match. That changes nothing when, before any given rest of a text, at
most one length can lead on: the group's width is fixed; or it ends in a repeat of a fixed-width body that
no following character can start again (then every plain match has taken as many copies as there are).
"""

from __future__ import annotations

from trellis.fsm.charset import Ranges, intersect, union
from trellis.fsm.syntax import INF, Alt, Atomic, Builder, Cat, Chars, Node, Rep


def resolve(node: Node, build: Builder, follow: Ranges = ()) -> Node | None:
    """The tree without atomic groups, or None where one of them is not equal to its plain form.

    follow: every character that can come after this node.
    """
    if not node.atomic:
        return node
    if isinstance(node, Cat):
        parts: list[Node] = []
        for part in reversed(node.parts):
            plain = resolve(part, build, follow)
            if plain is None:
                return None
            parts.append(plain)
            follow = union([_first(part), follow]) if part.nullable else _first(part)
        return build.cat(reversed(parts))
    if isinstance(node, Alt):
        branches = [resolve(part, build, follow) for part in node.parts]
        return None if None in branches else build.alt([b for b in branches if b is not None])
    if isinstance(node, Rep):
        again = union([_first(node.body), follow]) if node.hi > 1 else follow
        body = resolve(node.body, build, again)
        return None if body is None else build.rep(body, node.lo, node.hi)
    assert isinstance(node, Atomic)
    body = resolve(node.body, build, follow)
    return body if body is not None and _commits_for_free(body, follow) else None


def _commits_for_free(body: Node, follow: Ranges) -> bool:
    *fixed, last = body.parts if isinstance(body, Cat) and body.parts else (body,)
    if isinstance(last, Rep) and _width(last) is None:
        if _width(last.body) in (None, 0) or intersect(_first(last.body), follow):
            return False
    else:
        fixed.append(last)
    return all(_width(part) is not None for part in fixed)


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


def _first(node: Node) -> Ranges:
    """Every character that a text of the node can begin with."""
    if isinstance(node, Chars):
        return node.ranges
    if isinstance(node, Alt):
        return union(_first(part) for part in node.parts)
    if isinstance(node, (Rep, Atomic)):
        return _first(node.body)
    found: list[Ranges] = []
    if isinstance(node, Cat):
        for part in node.parts:
            found.append(_first(part))
            if not part.nullable:
                break
    return union(found)
