"""What is still to be matched where there are assertions: an alternating automaton's sets of places.

A *clause* is a place of the pattern together with what else must be true of the rest of the text: it must
begin with a match of each pending look-ahead, and with none of the negative ones. A *choice* is a set of
clauses, one of which has to lead to a match; so an obligation is a choice as well, and reading a character
takes a choice to exactly one other. This is a Boolean automaton (Brzozowski and Leiss, 1980) over partial
derivatives, kept small by what makes different formulas equal: all negative obligations of a clause are one
choice (neither a nor b is not (a or b)), and a clause that asks for more than another is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trellis.fsm.borders import Borders
from trellis.fsm.continuations import Continuation, Continuations
from trellis.fsm.limits import Budget


@dataclass(frozen=True, eq=False)
class Clause:
    """place: what the rest of the text must match. must: choices that have to match it as well. never: a choice
    that must not. shortest: at least so many characters are needed."""

    uid: int
    place: Continuation
    must: tuple[Choice, ...]
    never: Choice | None
    shortest: int


@dataclass(frozen=True, eq=False)
class Choice:
    """One of the clauses has to match. Interned: equal choices are one object. shortest: as in Clause."""

    uid: int
    clauses: tuple[Clause, ...]
    members: frozenset[Clause]
    shortest: int


class Clauses:
    """The clauses and choices over one set of continuations. Not thread-safe; its owner locks.

    anything: the continuation that every text matches.
    """

    def __init__(self, places: Continuations, anything: Continuation, budget: Budget) -> None:
        self._places = places
        self._anything = anything
        self._budget = budget
        self._clauses: dict[tuple[int, tuple[int, ...], int], Clause] = {}
        self._choices: dict[tuple[int, ...], Choice] = {}
        self._joined: dict[tuple[int, ...], Choice] = {}
        self._borders = Borders()
        self._shortest: dict[int, int] = {}  # characters of the shortest text, by continuation
        self.none = self._choice([])
        self.all = self._choice([self._clause(anything, (), None)])

    def clause(
        self, place: Continuation, must: Iterable[Choice] = (), never: Iterable[Choice] = ()
    ) -> Clause | None:
        """A clause, or None where it plainly asks for what cannot be."""
        wanted = {choice.uid: choice for choice in must if choice is not self.all}
        forbidden = self.any_of(clause for choice in never for clause in choice.clauses)
        if self.none.uid in wanted or forbidden is self.all:
            return None
        kept = list(wanted.values())
        if len(kept) > 1:
            kept = self._narrowest(kept)
        if forbidden is self.none:
            return self._clause(place, tuple(kept), None)
        if any(choice.members <= forbidden.members for choice in kept):
            return None
        if self._clauses.get((place.uid, (), -1)) in forbidden.members:
            return None
        return self._clause(place, tuple(kept), forbidden)

    def _narrowest(self, choices: list[Choice]) -> list[Choice]:
        """Without what a narrower choice says already."""
        by_member: dict[Clause, list[Choice]] = {}
        for choice in choices:
            by_member.setdefault(choice.clauses[0], []).append(choice)
        kept: list[Choice] = []
        for choice in choices:
            self._budget.tick()
            rivals = (b for clause in choice.clauses for b in by_member.get(clause, ()))
            if not any(b is not choice and b.members <= choice.members for b in rivals):
                kept.append(choice)
        return kept

    def any_of(self, clauses: Iterable[Clause]) -> Choice:
        """The choice between these, simplified."""
        unique = {clause.uid: clause for clause in clauses}
        key = tuple(sorted(unique))
        found = self._joined.get(key)
        if found is None:
            found = self._joined[key] = self._simplified(list(unique.values()))
        return found

    def _simplified(self, clauses: list[Clause]) -> Choice:
        if self.all.clauses[0] in clauses:
            return self.all
        clauses = self._flat(clauses)
        groups: dict[tuple[tuple[Choice, ...], Choice | None], list[Continuation]] = {}
        for clause in clauses:
            groups.setdefault((clause.must, clause.never), []).append(clause.place)
        merged = [
            self._clause(place, must, never)
            for (must, never), places in groups.items()
            for place in self._places.simplify(places)
        ]
        if len(groups) > 1:
            merged = [a for a in merged if not any(b is not a and self._weaker(b, a) for b in merged)]
        return self.all if self.all.clauses[0] in merged else self._choice(merged)

    def _flat(self, clauses: list[Clause]) -> list[Clause]:
        """A clause that asks for a choice and nothing else is that choice."""
        out: dict[Clause, None] = {}
        for clause in clauses:
            alone = clause.place is self._anything and clause.never is None and len(clause.must) == 1
            out.update(dict.fromkeys(clause.must[0].clauses if alone else (clause,)))
        return list(out)

    def _weaker(self, a: Clause, b: Clause) -> bool:
        """Does a plainly hold wherever b does?"""
        self._budget.tick()
        if a.place is not b.place and a.place is not self._anything:
            return False
        if a.never is not None and (b.never is None or not a.never.members <= b.never.members):
            return False
        return all(any(narrow.members <= wide.members for narrow in b.must) for wide in a.must)

    def _clause(self, place: Continuation, must: tuple[Choice, ...], never: Choice | None) -> Clause:
        must = tuple(sorted(must, key=lambda choice: choice.uid))
        key = (place.uid, tuple(choice.uid for choice in must), -1 if never is None else never.uid)
        found = self._clauses.get(key)
        if found is None:
            self._budget.position()
            shortest = self._shortest_of(place) + sum(choice.shortest for choice in must)
            found = self._clauses[key] = Clause(len(self._clauses), place, must, never, shortest)
        return found

    def _shortest_of(self, place: Continuation) -> int:
        path: list[Continuation] = []
        while place.node is not None and place.rest is not None and place.uid not in self._shortest:
            path.append(place)
            place = place.rest
        found = self._shortest.get(place.uid, 0)
        for cell in reversed(path):
            assert cell.node is not None
            found += self._borders.shortest(cell.node)
            self._shortest[cell.uid] = found
        return found

    def _choice(self, clauses: list[Clause]) -> Choice:
        ordered = tuple(sorted(clauses, key=lambda clause: clause.uid))
        key = tuple(clause.uid for clause in ordered)
        found = self._choices.get(key)
        if found is None:
            self._budget.position()
            self._budget.memory += 100 * len(ordered)
            shortest = min((clause.shortest for clause in ordered), default=0)
            members = frozenset(ordered)
            found = self._choices[key] = Choice(len(self._choices), ordered, members, shortest)
        return found
