"""Questions about patterns, and patterns made from patterns: by automata over characters.

A pattern here is one of ``patterns.translate``: it is found anywhere in a text unless it is anchored.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence

from trellis.fsm.json_schema.pattern_nfa import SURROGATES, Nfa, Range, TooHard
from trellis.fsm.json_schema.spelled import Automaton, spell, texts_of

__all__ = ["PatternAlgebra", "TooHard"]

_STATES = 2_000
_CELLS = 200_000
_SPELLED_STATES = 400

# Per pattern: the states it is in, and whether nothing was read yet.
_Key = tuple[tuple[frozenset[int], ...], bool]


class PatternAlgebra:
    """Remembers the automata of the patterns of one schema. tick: called at every step."""

    def __init__(self, tick: Callable[[], None] = lambda: None) -> None:
        self._tick = tick
        self._nfas: dict[str, Nfa] = {}
        self._answers: dict[tuple[frozenset[str], frozenset[str]], bool] = {}
        self._differences: dict[tuple[tuple[str, ...], tuple[str, ...]], str | None] = {}

    def disjoint(self, patterns: Sequence[str]) -> bool:
        """Is there proof that no text matches them all?"""
        return self._nothing(patterns, ())

    def included(self, patterns: Sequence[str], larger: str) -> bool:
        """Is there proof that a text that matches all of the patterns matches the larger one?"""
        return larger in patterns or self._nothing(patterns, (larger,))

    def difference(self, patterns: Sequence[str], without: Sequence[str]) -> str | None:
        """A pattern for the texts that match all of the first and none of the second; None: there is no text.

        Raises TooHard.
        """
        key = tuple(patterns), tuple(without)
        if key not in self._differences:
            self._differences[key] = spell(self._automaton(*key), _SPELLED_STATES, self._tick)
        return self._differences[key]

    def texts(self, pattern: str, most: int) -> list[str] | None:
        """All texts in which the pattern is found; None if there may be more than so many."""
        if not (pattern.startswith("^") and pattern.endswith(r"\Z")):
            return None
        try:
            automaton = self._automaton([pattern], ())
        except TooHard:
            return None
        return texts_of(automaton, most)

    def _nothing(self, patterns: Sequence[str], without: Sequence[str]) -> bool:
        question = frozenset(patterns), frozenset(without)
        if question not in self._answers:
            try:
                self._answers[question] = not any(self._automaton(patterns, without).accepting)
            except TooHard:
                self._answers[question] = False
        return self._answers[question]

    def _nfa(self, pattern: str) -> Nfa:
        if pattern not in self._nfas:
            self._nfas[pattern] = Nfa(pattern, _STATES)
        return self._nfas[pattern]

    def _automaton(self, patterns: Sequence[str], without: Sequence[str]) -> Automaton:
        nfas = [self._nfa(pattern) for pattern in (*patterns, *without)]
        wanted = [True] * len(patterns) + [False] * len(without)
        segments = _segments(nfas)
        moves = [[_segmented(steps, segments) for steps in nfa.steps] for nfa in nfas]
        numbers: dict[_Key, int] = {}
        automaton = Automaton(segments, [], [])

        def number(key: _Key) -> int:
            if key not in numbers:
                numbers[key] = len(numbers)
                if len(numbers) > _STATES or len(numbers) * len(segments) > _CELLS:
                    raise TooHard("too many states")
                ends = (
                    nfa.final in nfa.closure(set(states), at_start=key[1], at_end=True)
                    for nfa, states in zip(nfas, key[0], strict=True)
                )
                automaton.accepting.append(list(ends) == wanted)
                pending.append(key)
            return numbers[key]

        pending: list[_Key] = []
        number((tuple(nfa.closure({0}, at_start=True, at_end=False) for nfa in nfas), True))
        while pending:
            key = pending.pop(0)
            row = []
            for segment in range(len(segments)):
                self._tick()
                states = tuple(
                    nfa.closure(_after(moves[i], key[0][i], segment), at_start=False, at_end=False)
                    for i, nfa in enumerate(nfas)
                )
                row.append(number((states, False)))
            automaton.rows.append(row)
        return automaton


def _segments(nfas: list[Nfa]) -> list[Range]:
    """The characters that texts hold, cut wherever some step tells them apart."""
    cuts = {0, SURROGATES[0], SURROGATES[1] + 1, sys.maxunicode + 1}
    for nfa in nfas:
        for steps in nfa.steps:
            for ranges, _ in steps:
                for low, high in ranges:
                    cuts.update((low, high + 1))
    ordered = sorted(cuts)
    return [
        (low, high - 1)
        for low, high in itertools.pairwise(ordered)
        if not SURROGATES[0] <= low <= SURROGATES[1]
    ]


def _segmented(steps: list[tuple[list[Range], int]], segments: list[Range]) -> list[list[int]]:
    """For each segment the states that a step leads to."""
    targets: list[list[int]] = [[] for _ in segments]
    for ranges, target in steps:
        for i, (low, high) in enumerate(segments):
            if any(first <= low and high <= last for first, last in ranges):
                targets[i].append(target)
    return targets


def _after(moves: list[list[list[int]]], states: frozenset[int], segment: int) -> Iterator[int]:
    return (target for state in states for target in moves[state][segment])
