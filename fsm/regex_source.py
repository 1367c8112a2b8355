"""States of a regex in bytes: states between characters, and nodes of UTF-8 inside one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from trellis.fsm.charset import EVERYTHING
from trellis.fsm.limits import Budget
from trellis.fsm.look_states import LookStates
from trellis.fsm.plain_states import PlainStates
from trellis.fsm.syntax import Builder, Chars, Node, walk
from trellis.fsm.utf8 import Partition, Utf8Tree

IntArray = npt.NDArray[np.int32]

# Between characters: (-1, number of the state). Inside: (number of the step, UTF-8 node).
_Key = tuple[int, int]
_BETWEEN = -1


class CharacterStates(Protocol):
    """A deterministic automaton over classes of characters, made while it is used; states are numbers.

    Every state that it hands out can still reach acceptance. Methods may raise ConstraintError.
    """

    def start(self) -> int | None:
        """The first state; None if no text matches."""

    def accepting(self, number: int) -> bool:
        """May the text end here?"""

    def successors(self, number: int) -> list[tuple[list[int], int]]:
        """(classes of characters, state after one of them), disjoint in their classes."""

    def within(self, number: int, horizon: int) -> int:
        """A state that behaves the same for the next ``horizon`` characters; may be the state itself."""


class _Step:
    """Where each class of characters leads from a state between characters; states that agree share one.

    targets: int32 [classes + 1], states of the automaton, 0 for none. live: bool [UTF-8 nodes].
    origin: one of the states between characters it belongs to.
    """

    __slots__ = ("live", "origin", "targets")

    def __init__(self, targets: IntArray, live: npt.NDArray[np.bool_], origin: int) -> None:
        self.targets = targets
        self.live = live
        self.origin = origin


class RegexSource:
    """The ``Source`` of a syntax tree without anchors and atomic groups, and not ``nothing``.

    trim: see ``LookStates``. Raises ConstraintError when the tree's first state is beyond the budget.
    """

    def __init__(self, root: Node, builder: Builder, budget: Budget, trim: bool = True) -> None:
        self._budget = budget
        sets = [node.ranges for node in walk(root) if isinstance(node, Chars)]
        if root.looks and isinstance(every := builder.chars(EVERYTHING), Chars):
            sets.append(every.ranges)
        partition = Partition.of(sets)
        self._tree = Utf8Tree(partition)
        self.byte_class = self._tree.byte_class
        self.columns = self._tree.columns
        self._states: CharacterStates
        if root.looks:
            self._states = LookStates(root, builder, budget, partition.members, trim)
        else:
            self._states = PlainStates(root, builder, budget, partition.members)
        self._step_of_state: dict[int, int] = {}
        self._steps: list[_Step] = []
        self._step_ids: dict[bytes, int] = {}

    def is_empty(self) -> bool:
        """Does no text match?"""
        return self._states.start() is None

    def start(self) -> Hashable:
        """Raises ValueError if no text matches."""
        start = self._states.start()
        if start is None:
            raise ValueError("the pattern matches no text")
        return _BETWEEN, start

    def expand(self, key: Hashable, intern: Callable[[Hashable], int]) -> tuple[IntArray, bool]:
        where, node = cast(_Key, key)
        accepting = False
        if where == _BETWEEN:
            accepting = self._states.accepting(node)
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
        bounded = self._states.within(origin, horizon)
        if bounded == origin:
            return key
        return (_BETWEEN, bounded) if where == _BETWEEN else (self._step(bounded, intern), node)

    def inside_character(self, key: Hashable) -> bool:
        return cast(_Key, key)[0] != _BETWEEN

    def _step(self, number: int, intern: Callable[[Hashable], int]) -> int:
        """The step out of a state between characters; computed once."""
        found = self._step_of_state.get(number)
        if found is not None:
            return found
        targets = np.zeros(self._tree.count + 1, np.int32)
        for classes, target in self._states.successors(number):
            targets[classes] = intern((_BETWEEN, target))
        key = targets.tobytes()
        step = self._step_ids.get(key)
        if step is None:
            step = self._step_ids[key] = len(self._steps)
            self._budget.memory += 2 * len(key) + len(self._tree.children)
            self._steps.append(_Step(targets, self._tree.live(targets), number))
        self._step_of_state[number] = step
        return step
