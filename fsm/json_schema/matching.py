"""Does a text match a pattern: in time linear in the text, whatever the pattern.

Patterns come from clients and texts from models; backtracking could take exponential time on them.
"""

from __future__ import annotations

from functools import lru_cache

from trellis.fsm.json_schema.pattern_nfa import Nfa, Range

_NFA_STATES = 20_000
_REMEMBERED = 10_000  # steps of the lazily built deterministic automaton


@lru_cache(maxsize=512)
def matcher(pattern: str) -> Matcher:
    """For a pattern of ``patterns.translate``. Raises TooHard."""
    return Matcher(Nfa(pattern, _NFA_STATES))


def matches(pattern: str, text: str) -> bool:
    """Is the pattern found in the text? Raises TooHard."""
    return matcher(pattern).found(text)


class Matcher:
    """Remembers the steps it has taken, up to a bound."""

    def __init__(self, nfa: Nfa) -> None:
        self._nfa = nfa
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._start = nfa.closure({0}, at_start=True, at_end=False)

    def found(self, text: str) -> bool:
        states = self._start
        for character in text:
            key = states, character
            after = self._steps.get(key)
            if after is None:
                after = self._step(states, ord(character))
                if len(self._steps) >= _REMEMBERED:
                    self._steps.clear()
                self._steps[key] = after
            states = after
        return self._nfa.final in self._nfa.closure(set(states), at_start=not text, at_end=True)

    def _step(self, states: frozenset[int], code: int) -> frozenset[int]:
        reached = {
            target for state in states for ranges, target in self._nfa.steps[state] if _inside(code, ranges)
        }
        return self._nfa.closure(reached, at_start=False, at_end=False)


def _inside(code: int, ranges: list[Range]) -> bool:
    return any(low <= code <= high for low, high in ranges)
