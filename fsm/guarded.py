"""Continuations with assertions: what must hold here for a step, or for going on without one.

A *guard* is a set of assertions that all have to hold at a position.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trellis.errors import ConstraintError
from trellis.fsm.continuations import Continuation, Continuations
from trellis.fsm.limits import Budget
from trellis.fsm.syntax import INF, Alt, Builder, Cat, Chars, Look, Node, Rep

Guard = frozenset[Look]
FREE: Guard = frozenset()
_GUARDS = 200  # at one place of a pattern; only patterns made to have many have more than a few


@dataclass(frozen=True)
class Move:
    """One character out of ``chars`` may be read if the guard holds before it; ``rest`` follows."""

    chars: Chars
    rest: Continuation
    guard: Guard


class GuardedContinuations:
    """What continuations can do, and under which guards. Not thread-safe; its owner locks."""

    def __init__(self, places: Continuations, builder: Builder, budget: Budget) -> None:
        self._places = places
        self._build = builder
        self._budget = budget
        self._moves: dict[int, tuple[Move, ...]] = {}
        self._empties: dict[int, tuple[Guard, ...]] = {}  # of continuations
        self._node_empties: dict[int, tuple[Guard, ...]] = {}

    def moves(self, start: Continuation) -> tuple[Move, ...]:
        """Every step from here."""
        found = self._moves.get(start.uid)
        if found is None:
            if start.looks:
                found = self._guarded_moves(start)
            else:
                found = tuple(Move(chars, rest, FREE) for chars, rest in self._places.moves(start))
            self._moves[start.uid] = found
        return found

    def empties(self, start: Continuation) -> tuple[Guard, ...]:
        """The guards under which nothing more needs to be read; none: never."""
        found = self._empties.get(start.uid)
        if found is None:
            found = (FREE,)
            cell = start
            while cell.node is not None and cell.rest is not None and found:
                found = self._both(found, self._of_node(cell.node))
                cell = cell.rest
            self._empties[start.uid] = found
        return found

    def _guarded_moves(self, start: Continuation) -> tuple[Move, ...]:
        ways: dict[tuple[Chars, Continuation], list[Guard]] = {}
        here: tuple[Guard, ...] = (FREE,)
        cell = start
        while cell.node is not None and cell.rest is not None and here:
            for move in self._first(cell.node, cell.rest):
                ways.setdefault((move.chars, move.rest), []).extend(guard | move.guard for guard in here)
            here = self._both(here, self._of_node(cell.node))
            cell = cell.rest
        return tuple(
            Move(chars, rest, guard)
            for (chars, rest), guards in ways.items()
            for guard in self._fewest(guards)
        )

    def _first(self, node: Node, rest: Continuation) -> list[Move]:
        """Moves that read their character inside node, when rest follows it."""
        self._budget.tick()
        if not node.looks:
            plain: list[tuple[Chars, Continuation]] = []
            self._places.first(node, rest, plain)
            return [Move(chars, after, FREE) for chars, after in plain]
        if isinstance(node, Alt):
            return [move for part in node.parts for move in self._first(part, rest)]
        if isinstance(node, Rep):
            return self._first_of_repeat(node, rest)
        if isinstance(node, Look):
            return []
        assert isinstance(node, Cat)
        out: list[Move] = []
        here: tuple[Guard, ...] = (FREE,)
        for i, part in enumerate(node.parts):
            after = self._places.chain(node.parts[i + 1 :], rest)
            out += _guarded(self._first(part, after), here)
            here = self._both(here, self._of_node(part))
            if not here:
                break
        return out

    def _first_of_repeat(self, node: Rep, rest: Continuation) -> list[Move]:
        left = node.hi if node.hi == INF else node.hi - 1
        out = self._first(node.body, self._copies(node.body, max(node.lo - 1, 0), left, rest))
        if node.lo > 1 and not node.body.nullable and (ways := self._of_node(node.body)):
            # Copies that read nothing here count, too: any number of those that are still due.
            after = self._copies(node.body, 0, left, rest)
            out += _guarded(self._first(node.body, after), ways)
        return out

    def _copies(self, body: Node, lo: int, hi: int, rest: Continuation) -> Continuation:
        return self._places.make(self._build.copies(body, lo, hi), rest) if hi else rest

    def _of_node(self, node: Node) -> tuple[Guard, ...]:
        """The guards under which the node matches the empty text."""
        if not node.looks or node.nullable:
            return (FREE,) if node.nullable else ()
        found = self._node_empties.get(node.uid)
        if found is None:
            if isinstance(node, Look):
                found = (frozenset({node}),)
            elif isinstance(node, Alt):
                found = self._fewest(guard for part in node.parts for guard in self._of_node(part))
            elif isinstance(node, Rep):
                found = self._of_node(node.body)
            else:
                assert isinstance(node, Cat)
                found = (FREE,)
                for part in node.parts:
                    found = self._both(found, self._of_node(part))
            self._node_empties[node.uid] = found
        return found

    def _both(self, left: tuple[Guard, ...], right: tuple[Guard, ...]) -> tuple[Guard, ...]:
        if not left or not right:
            return ()
        if right == (FREE,):
            return left
        return self._fewest(a | b for a in left for b in right)

    def _fewest(self, guards: Iterable[Guard]) -> tuple[Guard, ...]:
        """Without those that ask for more than another."""
        kept: list[Guard] = []
        for guard in sorted(set(guards), key=len):
            self._budget.tick()
            if not any(other <= guard for other in kept):
                kept.append(guard)
            if len(kept) > _GUARDS:
                reason = f"more than {_GUARDS} ways to combine assertions at one place; simplify it"
                raise ConstraintError(self._budget.kind, "limit", "", reason)
        return tuple(kept)


def _guarded(moves: list[Move], guards: tuple[Guard, ...]) -> list[Move]:
    return [Move(move.chars, move.rest, guard | move.guard) for move in moves for guard in guards]
