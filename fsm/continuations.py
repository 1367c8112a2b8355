"""A nondeterministic automaton whose places are made on demand: continuations of a syntax tree.

A continuation is what is still to be matched, as a linked list of nodes. Reading a character takes a node
apart and puts a rest in front of the list (Antimirov's partial derivatives, 1996). A bounded repeat is a
pair of numbers that count down, so ``x{0,10000}`` costs what is visited of it and not 10,000 copies.
"""

from __future__ import annotations

from collections.abc import Iterable

from trellis.fsm.limits import Budget
from trellis.fsm.syntax import INF, Alt, Builder, Cat, Chars, Node, Rep

# How far into a continuation counters are looked for when a set of them is simplified.
_MERGE_DEPTH = 64
_MERGE_COUNTERS = 4


class Continuation:
    """``node`` and then ``rest``; the end has neither. Interned: equal continuations are one object.

    nullable: nothing more needs to be read, whatever assertions say. looks: there is an assertion in it.
    moves: what can be read first and what follows then; None until asked for, and where there are assertions.
    """

    __slots__ = ("_bounded", "_counters", "looks", "moves", "node", "nullable", "rest", "uid")

    def __init__(self, uid: int, node: Node | None, rest: Continuation | None) -> None:
        self.uid = uid
        self.node = node
        self.rest = rest
        self.nullable: bool = node is None or (node.nullable and rest is not None and rest.nullable)
        self.looks: bool = node is not None and (node.looks or (rest is not None and rest.looks))
        self.moves: tuple[tuple[Chars, Continuation], ...] | None = None
        self._counters: tuple[_Counter, ...] | None = None
        self._bounded: tuple[int, Continuation] | None = None


# Where a counter stands (everything of the continuation but the counter's bounds), and its bounds.
_Counter = tuple[tuple[tuple[int, ...], int, int], int, int]


class Continuations:
    """The continuations of one tree. Not thread-safe; its owner locks."""

    def __init__(self, builder: Builder, budget: Budget) -> None:
        self._build = builder
        self._budget = budget
        self._cells: dict[tuple[int, int], Continuation] = {}
        self.end = Continuation(0, None, None)

    def __len__(self) -> int:
        return len(self._cells)

    def make(self, node: Node, rest: Continuation) -> Continuation:
        """node followed by rest."""
        return self.chain(node.parts if isinstance(node, Cat) else (node,), rest)

    def chain(self, parts: tuple[Node, ...], rest: Continuation) -> Continuation:
        """The parts in a row, then rest."""
        for part in reversed(parts):
            cell = self._cells.get((part.uid, rest.uid))
            if cell is None:
                self._budget.position()
                cell = Continuation(len(self._cells) + 1, part, rest)
                self._cells[part.uid, rest.uid] = cell
            rest = cell
        return rest

    def moves(self, start: Continuation) -> tuple[tuple[Chars, Continuation], ...]:
        """Every (set of characters, continuation after one of them) from here."""
        if start.moves is None:
            found: list[tuple[Chars, Continuation]] = []
            cell = start
            while cell.node is not None and cell.rest is not None:
                self.first(cell.node, cell.rest, found)
                if not cell.node.nullable:
                    break
                cell = cell.rest
            start.moves = tuple(dict.fromkeys(found))
        return start.moves

    def first(self, node: Node, rest: Continuation, out: list[tuple[Chars, Continuation]]) -> None:
        """Moves that read their character inside node, when rest follows it."""
        self._budget.tick()
        if isinstance(node, Chars):
            out.append((node, rest))
        elif isinstance(node, Alt):
            for part in node.parts:
                self.first(part, rest, out)
        elif isinstance(node, Rep):
            left = node.hi if node.hi == INF else node.hi - 1
            if left:
                rest = self.make(self._build.copies(node.body, max(node.lo - 1, 0), left), rest)
            self.first(node.body, rest, out)
        elif isinstance(node, Cat):
            open_parts = (
                next((i for i, p in enumerate(node.parts) if not p.nullable), len(node.parts) - 1) + 1
            )
            for i in range(open_parts):
                self.first(node.parts[i], self.chain(node.parts[i + 1 :], rest), out)

    def simplify(self, places: Iterable[Continuation]) -> tuple[Continuation, ...]:
        """A smaller set with the same language: places that differ in one counter only are joined.

        ``x{2,5}y`` and ``x{1,4}y`` together are ``x{1,5}y``. This keeps nested bounded repeats small.
        """
        unique = {place.uid: place for place in places}
        level = 0
        while len(unique) > 1 and level < _MERGE_COUNTERS:
            unique, found = self._join_level(unique, level)
            if not found:
                break
            level += 1
        return tuple(unique[uid] for uid in sorted(unique))

    def _join_level(
        self, places: dict[int, Continuation], level: int
    ) -> tuple[dict[int, Continuation], bool]:
        groups: dict[tuple[tuple[int, ...], int, int], list[tuple[int, int, Continuation]]] = {}
        kept: dict[int, Continuation] = {}
        for uid, place in places.items():
            counters = self._counters(place)
            if level < len(counters):
                key, lo, hi = counters[level]
                groups.setdefault(key, []).append((lo, hi, place))
            else:
                kept[uid] = place
        for members in groups.values():
            for place in self._join(members, level) if len(members) > 1 else [members[0][2]]:
                kept[place.uid] = place
        return kept, bool(groups)

    def _join(self, members: list[tuple[int, int, Continuation]], level: int) -> list[Continuation]:
        members.sort(key=lambda member: member[:2])
        out: list[Continuation] = []
        lo, hi, place = members[0]
        joined = False
        for next_lo, next_hi, next_place in members[1:]:
            if next_lo <= hi + 1:
                joined = joined or next_hi > hi
                hi = max(hi, next_hi)
            else:
                out.append(self._with_bounds(place, level, lo, hi) if joined else place)
                lo, hi, place, joined = next_lo, next_hi, next_place, False
        out.append(self._with_bounds(place, level, lo, hi) if joined else place)
        return out

    def _counters(self, place: Continuation) -> tuple[_Counter, ...]:
        if place._counters is None:
            found: list[_Counter] = []
            prefix: tuple[int, ...] = ()
            cell = place
            while cell.node is not None and cell.rest is not None and len(prefix) < _MERGE_DEPTH:
                node = cell.node
                if isinstance(node, Rep) and _counts(node):
                    found.append(((prefix, node.body.uid, cell.rest.uid), node.lo, node.hi))
                    if len(found) == _MERGE_COUNTERS:
                        break
                prefix = (*prefix, node.uid)
                cell = cell.rest
            place._counters = tuple(found)
        return place._counters

    def _with_bounds(self, place: Continuation, level: int, lo: int, hi: int) -> Continuation:
        """The same continuation with other bounds of its counter number ``level``."""
        before: list[Node] = []
        cell = place
        while cell.node is not None and cell.rest is not None:
            node = cell.node
            if isinstance(node, Rep) and _counts(node):
                if level == 0:
                    rest = self.make(self._build.copies(node.body, lo, hi), cell.rest)
                    for earlier in reversed(before):
                        rest = self.make(earlier, rest)
                    return rest
                level -= 1
            before.append(node)
            cell = cell.rest
        raise ValueError(f"the continuation has no counter {level}")

    def within(self, place: Continuation, horizon: int) -> Continuation:
        """A continuation that behaves the same for the next ``horizon`` characters.

        Counters that cannot run out that soon are cut to horizon + 1, so places far from their bounds
        share one (and with it a token mask).
        """
        path: list[Continuation] = []
        cell = place
        while cell.node is not None and cell.rest is not None and not _known(cell, horizon):
            path.append(cell)
            cell = cell.rest
        done = cell._bounded[1] if cell._bounded else cell
        for cell in reversed(path):
            node = cell.node
            assert node is not None
            if isinstance(node, Rep) and (horizon + 1 < node.lo or horizon + 1 < node.hi < INF):
                hi = INF if node.hi == INF else min(node.hi, horizon + 1)
                node = self._build.copies(node.body, min(node.lo, horizon + 1), hi)
            done = self.make(node, done)
            cell._bounded = (horizon, done)
        return done


def _known(cell: Continuation, horizon: int) -> bool:
    return cell._bounded is not None and cell._bounded[0] == horizon


def _counts(node: Rep) -> bool:
    """Has the repeat bounds that run down as it is used?"""
    return node.lo > 0 or node.hi < INF
