"""Patterns to nondeterministic automata over characters."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

try:
    from re import _constants as _ops  # type: ignore[attr-defined]
    from re import _parser as _sre  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_constants as _ops
    import sre_parse as _sre

Range = tuple[int, int]
SURROGATES = (0xD800, 0xDFFF)  # are in no text
_ANY = [(0, sys.maxunicode)]
_NOT_NEWLINE = [(0, 9), (11, sys.maxunicode)]
_REPEATS = 10_000
_CASED = 5_000


class TooHard(Exception):
    """The pattern, or what is asked about it, is beyond the limits here."""


def has_inner_anchors(pattern: str) -> bool:
    """Does an anchor stand elsewhere than at the ends of an alternative?"""
    return _has_inner_anchors(_sre.parse(pattern), True, True)


def _has_inner_anchors(items: Any, first: bool, last: bool) -> bool:
    """first, last: whether the items begin, or end, the pattern."""
    for i, (operator, argument) in enumerate(items):
        begins, ends = first and i == 0, last and i == len(items) - 1
        if operator is _ops.AT:
            found = not (begins if argument is _ops.AT_BEGINNING else ends)
        elif operator is _ops.BRANCH:
            found = any(_has_inner_anchors(branch, begins, ends) for branch in argument[1])
        elif operator is _ops.SUBPATTERN:
            found = _has_inner_anchors(argument[3], begins, ends)
        else:
            repeated = operator in (_ops.MAX_REPEAT, _ops.MIN_REPEAT)
            found = repeated and _has_inner_anchors(argument[2], False, False)
        if found:
            return True
    return False


class Nfa:
    """The texts in which a pattern (of ``patterns.translate``) is found.

    steps[s]: (ranges of characters, next state). jumps[s]: (condition, next state), where the condition is
    ``""``, ``"start"`` (of the text) or ``"end"``. final: the one accepting state.
    """

    def __init__(self, pattern: str, most_states: int) -> None:
        """Raises TooHard."""
        self.steps: list[list[tuple[list[Range], int]]] = []
        self.jumps: list[list[tuple[str, int]]] = []
        self._most_states = most_states
        try:
            parsed = _sre.parse(pattern)
        except (re.error, RecursionError, OverflowError, ValueError):
            raise TooHard(pattern) from None
        self._any_case = bool(parsed.state.flags & re.IGNORECASE)
        self._dot_is_all = False
        start = self._state()
        self.steps[start].append((_ANY, start))
        self.final = self._sequence(parsed, start)
        self.steps[self.final].append((_ANY, self.final))

    def _state(self) -> int:
        if len(self.steps) >= self._most_states:
            raise TooHard("too many states")
        self.steps.append([])
        self.jumps.append([])
        return len(self.steps) - 1

    def _sequence(self, items: Any, start: int) -> int:
        for operator, argument in items:
            start = self._item(operator, argument, start)
        return start

    def _item(self, operator: Any, argument: Any, start: int) -> int:
        if operator is _ops.BRANCH:
            end = self._state()
            for branch in argument[1]:
                self.jumps[self._sequence(branch, self._fork(start))].append(("", end))
            return end
        if operator is _ops.SUBPATTERN:
            return self._group(argument, start)
        if operator in (_ops.MAX_REPEAT, _ops.MIN_REPEAT):
            least, most, items = argument
            return self._repeat(least, most, items, start)
        end = self._state()
        if operator is _ops.AT:
            condition = {_ops.AT_BEGINNING: "start", _ops.AT_END_STRING: "end"}.get(argument)
            if condition is None:
                raise TooHard(str(argument))
            self.jumps[start].append((condition, end))
        else:
            everything = operator is _ops.ANY and self._dot_is_all
            ranges = _ANY if everything else _ranges(operator, argument, self._any_case)
            self.steps[start].append((ranges, end))
        return end

    def _group(self, argument: Any, start: int) -> int:
        before = self._dot_is_all
        self._dot_is_all |= bool(argument[1] & re.DOTALL)
        end = self._sequence(argument[3], start)
        self._dot_is_all = before
        return end

    def _fork(self, start: int) -> int:
        branch = self._state()
        self.jumps[start].append(("", branch))
        return branch

    def _repeat(self, least: int, most: Any, items: Any, start: int) -> int:
        unbounded = most is _ops.MAXREPEAT
        if (least if unbounded else most) > _REPEATS:
            raise TooHard("too many repetitions")
        for _ in range(least):
            start = self._sequence(items, start)
        end = self._state()
        if unbounded:
            loop = self._fork(start)
            self.jumps[self._sequence(items, loop)].append(("", loop))
            self.jumps[loop].append(("", end))
            return end
        self.jumps[start].append(("", end))
        for _ in range(most - least):
            start = self._sequence(items, start)
            self.jumps[start].append(("", end))
        return end

    def closure(self, states: Iterator[int] | set[int], at_start: bool, at_end: bool) -> frozenset[int]:
        reached = set(states)
        pending = list(reached)
        while pending:
            for condition, target in self.jumps[pending.pop()]:
                allowed = (
                    not condition or (condition == "start" and at_start) or (condition == "end" and at_end)
                )
                if allowed and target not in reached:
                    reached.add(target)
                    pending.append(target)
        return frozenset(reached)


def _ranges(operator: Any, argument: Any, any_case: bool) -> list[Range]:
    if operator is _ops.LITERAL:
        return _cases([(argument, argument)], any_case)
    if operator is _ops.NOT_LITERAL:
        return complement(_cases([(argument, argument)], any_case))
    if operator is _ops.ANY:
        return _NOT_NEWLINE
    if operator is not _ops.IN:
        raise TooHard(str(operator))
    negated = argument[0][0] is _ops.NEGATE
    ranges: list[Range] = []
    for kind, value in argument[negated:]:
        if kind is _ops.LITERAL:
            ranges.append((value, value))
        elif kind is _ops.RANGE:
            ranges.append(value)
        else:
            raise TooHard(str(kind))
    ranges = _cases(ranges, any_case)
    return complement(ranges) if negated else ranges


def _cases(ranges: list[Range], any_case: bool) -> list[Range]:
    """With the other case of each character, where that is one character."""
    if not any_case:
        return ranges
    if sum(high - low for low, high in ranges) > _CASED:
        raise TooHard("a large class without regard to case")
    found = list(ranges)
    for low, high in ranges:
        for code in range(low, high + 1):
            for other in (chr(code).lower(), chr(code).upper()):
                if len(other) == 1:
                    found.append((ord(other), ord(other)))
    return found


def complement(ranges: list[Range]) -> list[Range]:
    gaps, after = [], 0
    for low, high in sorted(ranges):
        if low > after:
            gaps.append((after, low - 1))
        after = max(after, high + 1)
    if after <= sys.maxunicode:
        gaps.append((after, sys.maxunicode))
    return gaps
