"""States of a regex: sets of continuations between characters, and nodes of UTF-8 inside one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import cast

import numpy as np
import numpy.typing as npt

from trellis.fsm.continuations import Continuation, Continuations
from trellis.fsm.limits import Budget
from trellis.fsm.syntax import Builder, Chars, Node, walk
from trellis.fsm.utf8 import Partition, Utf8Tree

IntArray = npt.NDArray[np.int32]

# Between characters: (-1, number of the set of continuations). Inside: (number of the step, UTF-8 node).
_Key = tuple[int, int]
_BETWEEN = -1


class _Step:
    """Where each class of characters leads from a set of continuations; sets that agree share one.

    targets: int32 [classes + 1], states of the automaton, 0 for none. live: bool [UTF-8 nodes].
    origin: one of the sets of continuations it belongs to.
    """

    __slots__ = ("live", "origin", "targets")

    def __init__(self, targets: IntArray, live: npt.NDArray[np.bool_], origin: int) -> None:
        self.targets = targets
        self.live = live
        self.origin = origin


class RegexSource:
    """The ``Source`` of a syntax tree without anchors and atomic groups, and not the empty language."""

    def __init__(self, root: Node, builder: Builder, budget: Budget) -> None:
        self._budget = budget
        self._places = Continuations(builder, budget)
        self._root = self._places.make(root, self._places.end)
        sets = [node.ranges for node in walk(root) if isinstance(node, Chars)]
        partition = Partition.of(sets)
        self._tree = Utf8Tree(partition)
        self._classes = partition.members
        self.byte_class = self._tree.byte_class
        self.columns = self._tree.columns
        self._sets: list[tuple[Continuation, ...]] = []
        self._set_ids: dict[tuple[int, ...], int] = {}
        self._step_of_set: dict[int, int] = {}
        self._steps: list[_Step] = []
        self._step_ids: dict[bytes, int] = {}

    def start(self) -> Hashable:
        return self._between([self._root])

    def expand(self, key: Hashable, intern: Callable[[Hashable], int]) -> tuple[IntArray, bool]:
        where, node = cast(_Key, key)
        accepting = False
        if where == _BETWEEN:
            accepting = any(place.nullable for place in self._sets[node])
            where, node = self._step(node, intern), 0
        step = self._steps[where]
        row: IntArray = step.targets[self._tree.leaf[node]]
        for columns, child in self._tree.children[node]:
            if step.live[child]:
                row[columns] = intern((where, child))
        return row, accepting

    def within(self, key: Hashable, horizon: int, intern: Callable[[Hashable], int]) -> Hashable:
        where, node = cast(_Key, key)
        origin = node if where == _BETWEEN else self._steps[where].origin
        places = self._sets[origin]
        bounded = [self._places.within(place, horizon) for place in places]
        if all(a is b for a, b in zip(places, bounded, strict=True)):
            return key
        between = self._between(bounded)
        return between if where == _BETWEEN else (self._step(between[1], intern), node)

    def inside_character(self, key: Hashable) -> bool:
        return cast(_Key, key)[0] != _BETWEEN

    def _between(self, places: list[Continuation]) -> _Key:
        simple = self._places.simplify(places)
        ids = tuple(place.uid for place in simple)
        number = self._set_ids.get(ids)
        if number is None:
            number = self._set_ids[ids] = len(self._sets)
            self._sets.append(simple)
        return _BETWEEN, number

    def _step(self, number: int, intern: Callable[[Hashable], int]) -> int:
        """The step out of a set of continuations; computed once."""
        found = self._step_of_set.get(number)
        if found is not None:
            return found
        targets = np.zeros(self._tree.count + 1, np.int32)
        for classes, places in self._successors(self._sets[number]):
            targets[classes] = intern(self._between(places))
        key = targets.tobytes()
        step = self._step_ids.get(key)
        if step is None:
            step = self._step_ids[key] = len(self._steps)
            self._budget.memory += 2 * len(key) + len(self._tree.children)
            self._steps.append(_Step(targets, self._tree.live(targets), number))
        self._step_of_set[number] = step
        return step

    def _successors(self, places: tuple[Continuation, ...]) -> list[tuple[list[int], list[Continuation]]]:
        """(classes of characters, continuations after one of them), disjoint in their classes."""
        by_set: dict[Chars, list[Continuation]] = {}
        for place in places:
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
            (classes, [rest for chars in members for rest in by_set[chars]])
            for classes, members in groups.values()
        ]
