"""States of a pattern without assertions: sets of continuations."""

from __future__ import annotations

from trellis.fsm.charset import Ranges
from trellis.fsm.continuations import Continuation, Continuations
from trellis.fsm.limits import Budget
from trellis.fsm.syntax import Builder, Chars, Node


class PlainStates:
    """The ``CharacterStates`` of a tree without assertions that is not ``nothing``: each of them is alive.

    classes: the classes of characters that make up each set of the tree.
    """

    def __init__(
        self, root: Node, builder: Builder, budget: Budget, classes: dict[Ranges, tuple[int, ...]]
    ) -> None:
        self._budget = budget
        self._classes = classes
        self._places = Continuations(builder, budget)
        self._sets: list[tuple[Continuation, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._start = self._number([self._places.make(root, self._places.end)])

    def start(self) -> int:
        return self._start

    def accepting(self, number: int) -> bool:
        return any(place.nullable for place in self._sets[number])

    def within(self, number: int, horizon: int) -> int:
        places = self._sets[number]
        bounded = [self._places.within(place, horizon) for place in places]
        if all(a is b for a, b in zip(places, bounded, strict=True)):
            return number
        return self._number(bounded)

    def successors(self, number: int) -> list[tuple[list[int], int]]:
        by_set: dict[Chars, list[Continuation]] = {}
        for place in self._sets[number]:
            for chars, rest in self._places.moves(place):
                by_set.setdefault(chars, []).append(rest)
        sets_of_class: dict[int, list[Chars]] = {}
        for chars in by_set:
            self._budget.tick()
            for cls in self._classes[chars.ranges]:
                sets_of_class.setdefault(cls, []).append(chars)
        groups: dict[tuple[int, ...], tuple[list[int], list[Chars]]] = {}
        for cls, members in sets_of_class.items():
            groups.setdefault(tuple(c.uid for c in members), ([], members))[0].append(cls)
        return [
            (classes, self._number([rest for chars in members for rest in by_set[chars]]))
            for classes, members in groups.values()
        ]

    def _number(self, places: list[Continuation]) -> int:
        simple = self._places.simplify(places)
        ids = tuple(place.uid for place in simple)
        number = self._numbers.get(ids)
        if number is None:
            number = self._numbers[ids] = len(self._sets)
            self._sets.append(simple)
        return number
