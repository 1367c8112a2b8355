"""Finding the first match of a regular expression in text that arrives in pieces, in linear time.

The match is the one that is complete first; of those that end there, the longest. So it depends neither on how the
text was cut into pieces nor on how the pattern is written (a lazy quantifier finds what a greedy one does).

Every character may begin a match: each that still can become one is a state of the pattern's automaton and the place
where it began, and of those in one state only the longest matters. So a byte costs as many steps as there are states
in which a match may be, which is seldom more than two or three, and at most ``MAX_BEGUN``.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from functools import lru_cache

from trellis.errors import ConstraintError
from trellis.fsm.automaton import DEAD, START
from trellis.fsm.charset import EVERYTHING
from trellis.fsm.dfa import LazyDfa
from trellis.fsm.limits import Budget, Limits
from trellis.fsm.regex import Regex
from trellis.fsm.regex_source import RegexSource
from trellis.fsm.syntax import Builder

LIMITS = Limits(
    pattern_bytes=256,
    nesting=32,
    repeat=1_000,
    positions=10_000,
    states=4_000,
    memory_bytes=4 << 20,
    compile_s=0.5,
    mask_s=0.2,
)
STOP_REGEX = "stop_regex"  # of the errors that come up in the middle of a text
MAX_BEGUN = 128  # places of one text in which a match may have begun
_KEPT = 64  # patterns whose automaton is kept


@dataclass(frozen=True)
class Match:
    """end: bytes of the piece that were read. length: bytes of the match, which ends there."""

    end: int
    length: int


class SearchPattern:
    """A compiled pattern. Shared by requests and threads; the automaton is built while it is used.

    Raises ConstraintError: ``syntax``, ``limit``, ``timeout``, ``empty`` (it matches no text), and ``unsupported``:
    besides what no ``regex`` may have, look-around and anchors, which ask for text that is not there yet; and
    patterns that match the empty text, which is everywhere.
    """

    def __init__(self, pattern: str) -> None:
        regex = Regex(pattern, LIMITS)
        if regex.has_assertions:
            reason = (
                "look-around, anchors and \\b cannot be searched for in text that is still being written; "
                "match the characters themselves, e.g. \\nQ: for a line that begins with Q:"
            )
            raise ConstraintError("regex", "unsupported", "", reason)
        self.pattern = pattern
        self.budget = Budget(STOP_REGEX, LIMITS)
        self.budget.start(LIMITS.compile_s)
        builder = Builder(EVERYTHING, self.budget.tick)
        root = regex.asserting_tree(builder)
        source = None if root is builder.nothing else RegexSource(root, builder, self.budget)
        if source is None or source.is_empty():
            raise ConstraintError("regex", "empty", "", "no text matches this pattern")
        self.automaton = LazyDfa(source, self.budget)
        if self.automaton.accepting(START):
            reason = "it matches the empty text, so it would stop every text at once; demand a character (+, not *)"
            raise ConstraintError("regex", "unsupported", "", reason)
        first = bytes(self.automaton.live_bytes(START))
        self.first_byte = re.compile(b"[" + re.escape(first) + b"]", re.DOTALL)
        self.lock = threading.Lock()


@lru_cache(_KEPT)
def search_pattern(pattern: str) -> SearchPattern:
    """The compiled pattern; the last ones are kept. Raises ConstraintError as ``SearchPattern`` does."""
    return SearchPattern(pattern)


class Search:
    """One text, looked through for one pattern.

    held: bytes at the end of what was read in which a match may have begun.
    """

    __slots__ = ("_begun", "_read", "held", "pattern")

    def __init__(self, pattern: SearchPattern) -> None:
        self.pattern = pattern
        self.held = 0
        self._begun: dict[int, int] = {}  # state → where the longest match that is in it began
        self._read = 0

    def reset(self) -> None:
        """Nothing that came so far is part of a later match."""
        self._begun, self.held = {}, 0

    def push(self, data: bytes) -> Match | None:
        """Read on. After a match the search is of no further use.

        Raises ConstraintError (``limit`` or ``timeout``) if going on would cost more than the limits allow.
        """
        pattern = self.pattern
        try:
            with pattern.lock:
                pattern.budget.start(LIMITS.mask_s)
                return self._push(data, pattern)
        except ConstraintError:
            search_pattern.cache_clear()  # others begin with an automaton that is not used up
            raise

    def _push(self, data: bytes, pattern: SearchPattern) -> Match | None:
        at, length = 0, len(data)
        while at < length:
            if not self._begun:
                found = pattern.first_byte.search(data, at)
                if found is None:
                    break
                at = found.start()
            match = self._step(data, at)
            if match is not None:
                return match
            at += 1
        self._read += length
        self.held = self._read - min(self._begun.values(), default=self._read)
        return None

    def _step(self, data: bytes, at: int) -> Match | None:
        """Read the byte at this place."""
        automaton, byte, place = self.pattern.automaton, data[at : at + 1], self._read + at
        begun: dict[int, int] = {}
        first = -1
        for state, start in [*self._begun.items(), (START, place)]:
            following = automaton.step(state, byte)
            if following == DEAD or begun.get(following, place + 1) <= start:
                continue
            begun[following] = start
            if automaton.accepting(following):
                first = start if first < 0 else min(first, start)
        if first >= 0:
            return Match(at + 1, place + 1 - first)
        if len(begun) > MAX_BEGUN:
            reason = f"a match may have begun in more than {MAX_BEGUN} places of the text; bound its repeats"
            raise ConstraintError(STOP_REGEX, "limit", "", reason)
        self._begun = begun
        return None
