r"""Anchors at the ends of the text: ``^ $ \A \Z`` are resolved in the tree, so the automaton has none.

``P ^ R`` means: P took no character. So ``^`` leaves of P only what is zero-width. ``R $ K`` means: K takes
nothing, or just the final newline. Both rules are applied wherever the anchor stands, groups included; only
inside a repeat, where P or K would be copies of the repeat itself, anchors are refused. So are many in a row,
as each of them takes apart what the others left.
"""

from __future__ import annotations

from trellis.fsm.charset import single
from trellis.fsm.syntax import Alt, Builder, Cat, Chars, Mark, MarkKind, Node, Rep

_NEWLINE = single(10)
_MOST = 16  # anchors that one text may pass
_BEGINS: tuple[MarkKind, ...] = ("begin", "line_begin")


class MisplacedAnchor(Exception):
    """An anchor that cannot be resolved; kind says which."""

    def __init__(self, kind: MarkKind, reason: str) -> None:
        super().__init__(reason)
        self.kind: MarkKind = kind


def resolve(node: Node, build: Builder) -> Node:
    """The same language without anchors; raises MisplacedAnchor."""
    _refuse_repeats(node)
    if _in_a_row(node) > _MOST:
        raise MisplacedAnchor(_first_mark(node), f"more than {_MOST} anchors in a row are not supported")
    node = _begin(node, build.empty_text, build)
    return _end(node, build.empty_text, build)


def _begin(node: Node, before: Node, build: Builder) -> Node:
    """``before`` followed by node, with the beginnings in node resolved."""
    if not node.marked:
        return build.cat([before, node])
    if isinstance(node, Cat):
        for part in node.parts:
            before = _begin(part, before, build)
        return before
    if isinstance(node, Alt):
        return build.alt([_begin(part, before, build) for part in node.parts])
    if isinstance(node, Mark) and node.kind in _BEGINS:
        if node.kind == "line_begin" and before is not build.empty_text:
            raise MisplacedAnchor(node.kind, "'^' with the flag (?m) is supported only at the start")
        return _zero_width(before, build)
    return build.cat([before, node])


def _end(node: Node, after: Node, build: Builder) -> Node:
    """node followed by ``after``, with the ends in node resolved; after has none left."""
    if not node.marked:
        return build.cat([node, after])
    if isinstance(node, Cat):
        for part in reversed(node.parts):
            after = _end(part, after, build)
        return after
    if isinstance(node, Alt):
        return build.alt([_end(part, after, build) for part in node.parts])
    assert isinstance(node, Mark)
    if node.kind == "line_end" and after is not build.empty_text:
        raise MisplacedAnchor(node.kind, "'$' with the flag (?m) is supported only at the end")
    kept = [build.empty_text] if after.nullable else []
    if node.kind == "text_end" and _accepts_newline(after):
        kept.append(build.chars(_NEWLINE))
    return build.alt(kept)


def _zero_width(node: Node, build: Builder) -> Node:
    """What of node takes no character: nothing, the empty text, or end marks."""
    if isinstance(node, Mark):
        return node
    if not node.marked:
        return build.empty_text if node.nullable else build.nothing
    if isinstance(node, Cat):
        return build.cat([_zero_width(part, build) for part in node.parts])
    assert isinstance(node, Alt)
    return build.alt([_zero_width(part, build) for part in node.parts])


def _accepts_newline(node: Node) -> bool:
    """Is a single newline in the language?"""
    if isinstance(node, Chars):
        return any(lo <= 10 <= hi for lo, hi in node.ranges)
    if isinstance(node, Alt):
        return any(_accepts_newline(part) for part in node.parts)
    if isinstance(node, Rep):
        return _accepts_newline(node.body) and (node.lo <= 1 or node.body.nullable)
    assert isinstance(node, Cat)
    return any(
        _accepts_newline(part) and all(p.nullable for p in node.parts[:i] + node.parts[i + 1 :])
        for i, part in enumerate(node.parts)
    )


def _refuse_repeats(node: Node) -> None:
    if not node.marked:
        return
    if isinstance(node, Rep):
        raise MisplacedAnchor(_first_mark(node.body), "an anchor inside a repeat is not supported")
    if isinstance(node, (Cat, Alt)):
        for part in node.parts:
            _refuse_repeats(part)


def _in_a_row(node: Node) -> int:
    """How many anchors may a text pass?"""
    if not node.marked:
        return 0
    if isinstance(node, Cat):
        return sum(map(_in_a_row, node.parts))
    return max(map(_in_a_row, node.parts)) if isinstance(node, Alt) else 1


def _first_mark(node: Node) -> MarkKind:
    if isinstance(node, Mark):
        return node.kind
    if isinstance(node, Rep):
        return _first_mark(node.body)
    assert isinstance(node, (Cat, Alt))
    return next(_first_mark(part) for part in node.parts if part.marked)
