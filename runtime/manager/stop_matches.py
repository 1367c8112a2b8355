"""The first stop string, or match of a stop pattern, in the text of a request."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from trellis.errors import ConstraintError
from trellis.fsm.search import Search, search_pattern
from trellis.runtime.manager.stop_strings import StopMatcher


class StopMatch(NamedTuple):
    """end: characters of the piece that were read. length: characters of the match, which ends there. stop: the
    string or the pattern."""

    end: int
    length: int
    stop: str


class StopMatches:
    """The match is the one that is complete first; of those, the longest; then a string before a pattern."""

    def __init__(self, stops: Sequence[str], patterns: Sequence[str]) -> None:
        self._strings = StopMatcher(stops) if stops else None
        self._searches: list[Search] = []
        # What goes wrong with a pattern here goes wrong in the scheduler too, which ends the request with the error.
        with contextlib.suppress(ConstraintError):
            self._searches = [Search(search_pattern(pattern)) for pattern in patterns]
        self._unsure = ""  # the text in which a match of a pattern may have begun

    def feed(self, text: str) -> StopMatch | None:
        """Read on."""
        found = self._strings.feed(text) if self._strings is not None else None
        first = None if found is None else StopMatch(found[0], len(found[1]), found[1])
        if not self._searches or not text:
            return first
        data, before = text.encode("utf-8", "surrogatepass"), self._unsure
        unsure = before + text
        for search in list(self._searches):
            try:
                match = search.push(data)
            except ConstraintError:
                self._searches.remove(search)
                continue
            if match is not None:
                end = _characters(data[: match.end])
                start = (before.encode("utf-8", "surrogatepass") + data[: match.end])[-match.length :]
                found_here = StopMatch(end, _characters(start), search.pattern.pattern)
                if first is None or (found_here.end, -found_here.length) < (first.end, -first.length):
                    first = found_here
        held = max((search.held for search in self._searches), default=0)
        tail = unsure.encode("utf-8", "surrogatepass")
        self._unsure = tail[len(tail) - held :].decode("utf-8", "surrogatepass")
        return first

    @property
    def held(self) -> int:
        """Characters at the end of the text so far that may be the beginning of a match."""
        strings = self._strings.held if self._strings is not None else 0
        return max(strings, len(self._unsure))


def _characters(data: bytes) -> int:
    """Characters that begin in these bytes of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in data)
