"""The syntax tree of a regular expression: hash-consed nodes over sets of characters.

Equal sub-trees are one object, so size stays that of the pattern however often a part is shared, and
equality is identity.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Literal

from trellis.fsm.charset import EVERYTHING, Ranges, complement, intersect, union

INF = 1 << 60
"""Upper bound of an unbounded repeat."""

MarkKind = Literal["begin", "line_begin", "end", "text_end", "line_end"]


@dataclass(frozen=True, eq=False)
class Node:
    """uid: unique in its builder. nullable: matches the empty text whatever stands around it (marks count as
    empty, assertions do not). marked, atomic, looks: has an anchor, an atomic group, an assertion inside."""

    uid: int
    nullable: bool
    marked: bool
    atomic: bool
    looks: bool


@dataclass(frozen=True, eq=False)
class Chars(Node):
    """One character out of a non-empty set."""

    ranges: Ranges


@dataclass(frozen=True, eq=False)
class Cat(Node):
    """All parts in a row; no parts: the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Alt(Node):
    """One of the parts; no parts: no text at all."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Rep(Node):
    """lo to hi copies of the body; hi is INF for no bound."""

    body: Node
    lo: int
    hi: int


@dataclass(frozen=True, eq=False)
class Atomic(Node):
    """An atomic group or possessive repeat; resolved away before the automaton is built."""

    body: Node


@dataclass(frozen=True, eq=False)
class Mark(Node):
    """A zero-width anchor; resolved away before the automaton is built."""

    kind: MarkKind


@dataclass(frozen=True, eq=False)
class Look(Node):
    """A zero-width assertion: what follows begins with a text of the body (ahead), or what came before ends
    with one. negative: it does not."""

    body: Node
    ahead: bool
    negative: bool


class Builder:
    """Makes nodes, simplified where that costs nothing and keeps the language exactly.

    alphabet: characters that may occur; every set is cut to it. tick: called for each part of each node, for
        a limit on the work (``Budget.tick``).
    """

    def __init__(self, alphabet: Ranges = EVERYTHING, tick: Callable[[], None] = lambda: None) -> None:
        self.alphabet = alphabet
        self._tick = tick
        self._nodes: dict[Hashable, Node] = {}
        self.empty_text = self.cat(())
        self.nothing = self.alt(())

    def _intern(self, key: Hashable, make: Callable[[int], Node]) -> Node:
        self._tick()
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = make(len(self._nodes))
        return node

    def chars(self, ranges: Ranges) -> Node:
        kept = intersect(ranges, self.alphabet)
        if not kept:
            return self.nothing
        return self._intern(("chars", kept), lambda uid: Chars(uid, False, False, False, False, kept))

    def mark(self, kind: MarkKind) -> Node:
        return self._intern(("mark", kind), lambda uid: Mark(uid, True, True, False, False, kind))

    def atomic(self, body: Node) -> Node:
        key = ("atomic", body.uid)
        return self._intern(key, lambda uid: Atomic(uid, body.nullable, body.marked, True, body.looks, body))

    def look(self, body: Node, ahead: bool, negative: bool) -> Node:
        """An assertion; a constant one is the empty text or nothing. body: without anchors."""
        if body.nullable or body is self.nothing:
            return self.empty_text if body.nullable != negative else self.nothing
        key = ("look", body.uid, ahead, negative)
        return self._intern(
            key, lambda uid: Look(uid, False, body.marked, body.atomic, True, body, ahead, negative)
        )

    def cat(self, parts: Iterable[Node]) -> Node:
        flat: list[Node] = []
        for part in parts:
            for piece in part.parts if isinstance(part, Cat) else (part,):
                self._tick()
                while flat and (narrowed := self._narrow(flat[-1], piece)) is not None:
                    flat.pop()
                    piece = narrowed
                if piece is self.nothing:
                    return self.nothing
                if flat and piece is flat[-1] and _asserts(piece):
                    continue
                joined = self._join(flat[-1], piece) if flat else None
                if joined is None:
                    flat.append(piece)
                else:
                    flat[-1] = joined
        if len(flat) == 1:
            return flat[0]
        nodes = tuple(flat)
        nullable = all(p.nullable for p in nodes)
        flags = _flags(nodes)
        key = ("cat", tuple(p.uid for p in nodes))
        return self._intern(key, lambda uid: Cat(uid, nullable, *flags, nodes))

    def _narrow(self, a: Node, b: Node) -> Node | None:
        """``(?!x)\\w`` and ``\\w(?<!x)`` are one character out of a smaller set."""
        if isinstance(a, Look) and a.ahead:
            look, other = a, b
        elif isinstance(b, Look) and not b.ahead:
            look, other = b, a
        else:
            return None
        if not isinstance(look.body, Chars) or not isinstance(other, Chars):
            return None
        wanted = complement(look.body.ranges) if look.negative else look.body.ranges
        return self.chars(intersect(other.ranges, wanted))

    def _join(self, a: Node, b: Node) -> Node | None:
        """``x{2}x?`` is ``x{2,3}``: neighbours that repeat the same body become one repeat."""
        if not isinstance(a, Rep) and not isinstance(b, Rep):
            return None
        body_a, lo_a, hi_a = (a.body, a.lo, a.hi) if isinstance(a, Rep) else (a, 1, 1)
        body_b, lo_b, hi_b = (b.body, b.lo, b.hi) if isinstance(b, Rep) else (b, 1, 1)
        if body_a is not body_b:
            return None
        return self.rep(body_a, lo_a + lo_b, hi_a + hi_b)

    def alt(self, parts: Iterable[Node]) -> Node:
        flat: dict[int, Node] = {}
        sets: list[Ranges] = []
        for part in parts:
            for piece in part.parts if isinstance(part, Alt) else (part,):
                self._tick()
                if isinstance(piece, Chars):
                    sets.append(piece.ranges)
                else:
                    flat[piece.uid] = piece
        if sets:
            merged = self.chars(union(sets))
            flat[merged.uid] = merged
        if len(flat) == 1:
            return next(iter(flat.values()))
        nodes = tuple(flat.values())
        nullable = any(p.nullable for p in nodes)
        flags = _flags(nodes)
        key = ("alt", tuple(sorted(flat)))
        return self._intern(key, lambda uid: Alt(uid, nullable, *flags, nodes))

    def rep(self, body: Node, lo: int, hi: int) -> Node:
        lo, hi = min(lo, INF), min(hi, INF)
        if body is self.nothing:
            return self.empty_text if lo == 0 else self.nothing
        if hi == 0 or body is self.empty_text:
            return self.empty_text
        if lo == hi == 1:
            return body
        if isinstance(body, Look):
            return body if lo else self.empty_text
        if body.marked:
            return self.alt([body, self.empty_text]) if (lo, hi) == (0, 1) else self._rep(body, lo, hi)
        if body.nullable:
            lo = 0  # copies may be empty, so fewer are never too few
        if isinstance(body, Rep) and _gapless(body, lo, hi):
            return self.rep(body.body, body.lo * lo, INF if INF in (body.hi, hi) else body.hi * hi)
        return self._rep(body, lo, hi)

    def copies(self, body: Node, lo: int, hi: int) -> Node:
        """What is left of a repeat of this body; unlike ``rep`` it does not look into the body."""
        return body if lo == hi == 1 else self._rep(body, lo, hi)

    def _rep(self, body: Node, lo: int, hi: int) -> Node:
        key = ("rep", body.uid, lo, hi)
        nullable = lo == 0 or body.nullable
        flags = _flags((body,))
        return self._intern(key, lambda uid: Rep(uid, nullable, *flags, body, lo, hi))


def _flags(nodes: tuple[Node, ...]) -> tuple[bool, bool, bool]:
    return any(p.marked for p in nodes), any(p.atomic for p in nodes), any(p.looks for p in nodes)


def _asserts(node: Node) -> bool:
    """Is it made of assertions and anchors only?"""
    if isinstance(node, (Cat, Alt)):
        return all(map(_asserts, node.parts))
    return isinstance(node, (Look, Mark))


def _gapless(inner: Rep, lo: int, hi: int) -> bool:
    """Does ``(x{a,b}){lo,hi}`` allow every count from a*lo to b*hi?

    k copies give the counts k*a .. k*b; the next k joins without a gap if (k+1)*a <= k*b + 1, which is
    hardest for the smallest k.
    """
    if inner.atomic:
        return False
    return lo == hi or (lo + 1) * inner.lo <= (lo * inner.hi if lo else 0) + 1


def walk(root: Node) -> list[Node]:
    """Every distinct node below (and with) the root, once."""
    seen: dict[int, Node] = {}
    stack = [root]
    while stack:
        node = stack.pop()
        if node.uid in seen:
            continue
        seen[node.uid] = node
        if isinstance(node, (Cat, Alt)):
            stack.extend(node.parts)
        elif isinstance(node, (Rep, Atomic, Look)):
            stack.append(node.body)
    return list(seen.values())
