"""Finding the first of several stop strings in a text that arrives in pieces, in linear time.

Aho and Corasick, "Efficient string matching: an aid to bibliographic search", CACM 18 (1975).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """An automaton over all stop strings; one step a character, whatever their number.

    The match is the one that is complete first; of those that end at the same character, the longest. So it
    does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]  # characters of the longest stop prefix that the text ends in
        self._match: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._fail = [0] * len(self._next)
        self._link()
        self._state = 0

    def feed(self, text: str) -> tuple[int, str] | None:
        """Read on. Returns (characters of ``text`` read, the stop string that ends there), or None."""
        state = self._state
        for i, character in enumerate(text, 1):
            while state and character not in self._next[state]:
                state = self._fail[state]
            state = self._next[state].get(character, 0)
            if (stop := self._match[state]) is not None:
                self._state = state
                return i, stop
        self._state = state
        return None

    @property
    def held(self) -> int:
        """Characters at the end of the text so far that may be the beginning of a stop string."""
        return self._depth[self._state]

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = following
        self._match[state] = stop

    def _link(self) -> None:
        """Failure links, breadth first: where to go on from when the next character does not fit."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                fail = self._fail[state]
                while fail and character not in self._next[fail]:
                    fail = self._fail[fail]
                self._fail[following] = self._next[fail].get(character, 0)
                if self._match[following] is None:
                    self._match[following] = self._match[self._fail[following]]
                queue.append(following)
