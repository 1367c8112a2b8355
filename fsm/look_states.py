"""States of a pattern with assertions: a choice of clauses, and what look-behind still has to know of the past.

A look-ahead becomes an obligation of the clause that passes it. A look-behind ``(?<=y)`` is a watch: an
automaton of ``.*y`` that runs along from the start of the text, for as long as an assertion may ask for it.

Not every such state can still reach acceptance: obligations may contradict each other. Whether one can is found
by a search for an accepting state, the nearest first; it ends at the first state that is known to be alive,
and a state without one is dead together with all that it leads to.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from trellis.fsm.charset import EVERYTHING, Ranges
from trellis.fsm.clauses import Choice, Clause, Clauses
from trellis.fsm.continuations import Continuation, Continuations
from trellis.fsm.guarded import GuardedContinuations
from trellis.fsm.limits import Budget
from trellis.fsm.syntax import INF, Alt, Builder, Cat, Chars, Look, Node, Rep, walk

_STATE_BYTES = 600  # of a state between characters: its key, its steps
_STEP_BYTES = 150  # of a remembered step of a choice


@dataclass(frozen=True, eq=False)
class Moment:
    """What is known of the past. watches: the choice of each watch, by the number of its body."""

    uid: int
    watches: dict[int, Choice]
    truths: dict[int, Choice] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _State:
    choice: Choice
    moment: Moment


class LookStates:
    """The ``CharacterStates`` of a tree with assertions.

    classes: the classes of characters that make up each set of the tree, and that of all characters.
    trim: leave out states that cannot reach acceptance; to judge whole texts there is no need to.
    """

    def __init__(
        self,
        root: Node,
        builder: Builder,
        budget: Budget,
        classes: dict[Ranges, tuple[int, ...]],
        trim: bool = True,
    ) -> None:
        self._budget = budget
        self._build = builder
        self._classes = classes
        self._trim = trim
        self._places = Continuations(builder, budget)
        self._guarded = GuardedContinuations(self._places, builder, budget)
        every = builder.copies(builder.chars(EVERYTHING), 0, INF)
        self._anything = self._places.make(every, self._places.end)
        self._clauses = Clauses(self._places, self._anything, budget)
        self._here = Continuation(-1, None, None)  # where a watch has seen what it waits for
        self._bodies = {look.body.uid: look.body for look in walk(root) if isinstance(look, Look)}
        self._behinds: dict[int, frozenset[int]] = {}  # of nodes
        self._watched: dict[int, frozenset[int]] = {-1: frozenset(), 0: frozenset()}  # of continuations
        self._watched_by: dict[int, frozenset[int]] = {}  # of choices
        self._sets: dict[tuple[int, int], frozenset[Chars]] = {}
        self._after: dict[tuple[int, int, int], Choice] = {}
        self._moments: dict[tuple[tuple[int, int], ...], Moment] = {}
        self._states: list[_State] = []
        self._numbers: dict[tuple[int, int], int] = {}
        self._steps: dict[int, list[tuple[list[int], int]]] = {}
        self._alive: dict[int, bool] = {}
        self._start = self._first(root)

    def _first(self, root: Node) -> int:
        clause = self._clauses.clause(self._places.make(root, self._places.end))
        assert clause is not None
        every = self._anything.node
        assert every is not None
        watches = {}
        for uid in self._behinds_of(root):
            body = self._places.make(self._bodies[uid], self._here)
            watches[uid] = self._only(self._places.make(every, body))
        return self._number(self._clauses.any_of([clause]), self._moment(watches))

    def _only(self, place: Continuation) -> Choice:
        clause = self._clauses.clause(place)
        return self._clauses.any_of([] if clause is None else [clause])

    # --- what the owner asks ---

    def start(self) -> int | None:
        """The first state; None if no text matches."""
        return self._start if not self._trim or self._is_alive(self._start) else None

    def accepting(self, number: int) -> bool:
        """May the text end here?"""
        state = self._states[number]
        return self._ends(state.choice, state.moment)

    def successors(self, number: int) -> list[tuple[list[int], int]]:
        """(classes of characters, state after one of them), disjoint in their classes."""
        steps = self._steps_of(number)
        return [step for step in steps if self._is_alive(step[1])] if self._trim else steps

    def within(self, number: int, horizon: int) -> int:
        """A state that behaves the same for the next ``horizon`` characters.

        Where something else must be true of the rest of the text, whether a state is alive may depend on
        counters that are far from their bounds: such a state stands for itself.
        """
        state = self._states[number]
        clauses = state.choice.clauses
        if any(clause.must or clause.never or clause.place.looks for clause in clauses):
            return number
        bounded = [self._clauses.clause(self._places.within(clause.place, horizon)) for clause in clauses]
        return self._number(self._clauses.any_of(c for c in bounded if c is not None), state.moment)

    # --- states ---

    def _number(self, choice: Choice, moment: Moment) -> int:
        key = choice.uid, moment.uid
        number = self._numbers.get(key)
        if number is None:
            self._budget.state(_STATE_BYTES)
            number = self._numbers[key] = len(self._states)
            self._states.append(_State(choice, moment))
        return number

    def _moment(self, watches: dict[int, Choice]) -> Moment:
        key = tuple(sorted((body, choice.uid) for body, choice in watches.items()))
        moment = self._moments.get(key)
        if moment is None:
            self._budget.position()
            moment = self._moments[key] = Moment(len(self._moments), watches)
        return moment

    def _steps_of(self, number: int) -> list[tuple[list[int], int]]:
        found = self._steps.get(number)
        if found is None:
            state = self._states[number]
            by_target: dict[int, list[int]] = {}
            for classes in self._alike(state):
                target = self._target(state, classes[0])
                if target is not None:
                    by_target.setdefault(target, []).extend(classes)
            found = self._steps[number] = [(classes, target) for target, classes in by_target.items()]
            self._budget.memory += sum(60 + 8 * len(classes) for classes, _ in found)
        return found

    def _target(self, state: _State, cls: int) -> int | None:
        moment = state.moment
        choice = self._step(state.choice, cls, moment)
        if choice is self._clauses.none:
            return None
        needed = self._needs(choice)
        watches = {body: self._step(moment.watches[body], cls, moment) for body in needed}
        return self._number(choice, self._moment(watches))

    def _alike(self, state: _State) -> list[list[int]]:
        """The classes that a state reads, those together that it cannot tell apart."""
        sets = self._sets_of(state.choice, state.moment)
        for watch in state.moment.watches.values():
            sets |= self._sets_of(watch, state.moment)
        inside: dict[int, int] = {}
        for i, chars in enumerate(sets):
            self._budget.tick()
            for cls in self._classes[chars.ranges]:
                inside[cls] = inside.get(cls, 0) | 1 << i
        groups: dict[int, list[int]] = {}
        for cls in sorted(inside):
            groups.setdefault(inside[cls], []).append(cls)
        return list(groups.values())

    def _is_alive(self, number: int) -> bool:
        """Can this state reach one that accepts? Best first, by the characters that are still needed."""
        known = self._alive.get(number)
        if known is not None:
            return known
        parent: dict[int, int] = {number: -1}
        heap = [(0, 0, 0, number)]
        while heap:
            self._budget.tick()
            at = heapq.heappop(heap)[3]
            if self._alive.get(at) or self.accepting(at) or self._is_free(at):
                while at >= 0:
                    self._alive[at] = True
                    at = parent[at]
                return True
            for _, target in self._steps_of(at):
                if target not in parent and self._alive.get(target) is not False:
                    parent[target] = at
                    state = self._states[target]
                    due = sum(watch.shortest for watch in state.moment.watches.values())
                    heapq.heappush(heap, (state.choice.shortest, due, len(parent), target))
        self._alive.update(dict.fromkeys(parent, False))
        return False

    def _is_free(self, number: int) -> bool:
        """Is there a way to match that no assertion can forbid?"""
        clauses = self._states[number].choice.clauses
        return any(not clause.must and clause.never is None and not clause.place.looks for clause in clauses)

    # --- choices ---

    def _step(self, choice: Choice, cls: int, moment: Moment) -> Choice:
        """The choice after one character of a class."""
        if choice is self._clauses.all or choice is self._clauses.none:
            return choice
        key = choice.uid, cls, moment.uid if self._needs(choice) else -1
        found = self._after.get(key)
        if found is None:
            self._budget.memory += _STEP_BYTES
            self._budget.tick()
            after: list[Clause] = []
            for clause in choice.clauses:
                after += self._clause_after(clause, cls, moment)
            found = self._after[key] = self._clauses.any_of(after)
        return found

    def _clause_after(self, clause: Clause, cls: int, moment: Moment) -> list[Clause]:
        must = [self._step(choice, cls, moment) for choice in clause.must]
        never = [] if clause.never is None else [self._step(clause.never, cls, moment)]
        if self._clauses.none in must or self._clauses.all in never:
            return []
        out: list[Clause] = []
        for move in self._guarded.moves(clause.place):
            if cls not in self._classes[move.chars.ranges]:
                continue
            wanted = [self._step(self._at(k, moment), cls, moment) for k in move.guard if not k.negative]
            unwanted = [self._step(self._at(k, moment), cls, moment) for k in move.guard if k.negative]
            after = self._clauses.clause(move.rest, (*must, *wanted), (*never, *unwanted))
            if after is not None:
                out.append(after)
        return out

    def _at(self, look: Look, moment: Moment) -> Choice:
        """What the rest of the text has to match for the body of an assertion to fit at this moment."""
        if look.ahead:
            return self._only(self._places.make(look.body, self._anything))
        found = moment.truths.get(look.body.uid)
        if found is None:
            seen: list[Clause | None] = []
            for clause in moment.watches[look.body.uid].clauses:
                never = [] if clause.never is None else [clause.never]
                for guard in self._guarded.empties(clause.place):
                    wanted = [self._at(k, moment) for k in guard if not k.negative]
                    unwanted = [self._at(k, moment) for k in guard if k.negative]
                    must = (*clause.must, *wanted)
                    seen.append(self._clauses.clause(self._anything, must, (*never, *unwanted)))
            found = self._clauses.any_of(clause for clause in seen if clause is not None)
            moment.truths[look.body.uid] = found
        return found

    def _ends(self, choice: Choice, moment: Moment) -> bool:
        """Is it matched by the empty rest of the text?"""
        return any(
            all(self._ends(wanted, moment) for wanted in clause.must)
            and not (clause.never is not None and self._ends(clause.never, moment))
            and any(
                all(self._ends(self._at(k, moment), moment) != k.negative for k in guard)
                for guard in self._guarded.empties(clause.place)
            )
            for clause in choice.clauses
        )

    def _sets_of(self, choice: Choice, moment: Moment) -> frozenset[Chars]:
        """The sets of characters that the next step of a choice depends on."""
        key = choice.uid, moment.uid if self._needs(choice) else -1
        found = self._sets.get(key)
        if found is None:
            sets: set[Chars] = set()
            for clause in choice.clauses:
                held = [*clause.must, *([] if clause.never is None else [clause.never])]
                for move in self._guarded.moves(clause.place):
                    sets.add(move.chars)
                    held += [self._at(look, moment) for look in move.guard]
                for other in held:
                    sets |= self._sets_of(other, moment)
            found = self._sets[key] = frozenset(sets)
        return found

    def _needs(self, choice: Choice) -> frozenset[int]:
        """The watches that the future of a choice depends on: the bodies of look-behinds in it."""
        found = self._watched_by.get(choice.uid)
        if found is None:
            found = frozenset()
            for clause in choice.clauses:
                held = [*clause.must, *([] if clause.never is None else [clause.never])]
                found = found.union(self._needs_of(clause.place), *map(self._needs, held))
            self._watched_by[choice.uid] = found
        return found

    def _needs_of(self, place: Continuation) -> frozenset[int]:
        path: list[Continuation] = []
        while place.uid not in self._watched:
            path.append(place)
            assert place.rest is not None
            place = place.rest
        found = self._watched[place.uid]
        for cell in reversed(path):
            assert cell.node is not None
            found = self._watched[cell.uid] = found | self._behinds_of(cell.node)
        return found

    def _behinds_of(self, node: Node) -> frozenset[int]:
        if not node.looks:
            return frozenset()
        found = self._behinds.get(node.uid)
        if found is None:
            found = frozenset()
            if isinstance(node, (Cat, Alt)):
                found = found.union(*map(self._behinds_of, node.parts))
            elif isinstance(node, (Rep, Look)):
                found = self._behinds_of(node.body)
                if isinstance(node, Look) and not node.ahead:
                    found |= {node.body.uid}
            self._behinds[node.uid] = found
        return found
