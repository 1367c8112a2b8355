"""Stop strings and stop patterns, found in the bytes of the output while it grows.

Bytes, not text: a token may hold a part of a character, and a stop string may begin in one token and end in
another. A match is reported as soon as its last byte is there, so the result does not depend on how the text
was cut into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from trellis.fsm.search import Search, search_pattern


class StopScanner:
    """Looks for any of the stop strings, and of the patterns' matches, in a stream of bytes. looks: whether there is any.

    Of the output only the last ``longest - 1`` bytes are kept, so each push costs O(len(data) + longest) however
    long the output is; for a pattern see ``trellis.fsm.search``.
    """

    __slots__ = ("_keep", "_patterns", "_searches", "_tail", "looks", "stops")

    def __init__(self, stops: Sequence[str], patterns: Sequence[str] = ()) -> None:
        self.stops = [(stop, stop.encode("utf-8", "surrogatepass")) for stop in stops if stop]
        self._patterns = patterns
        self.looks = bool(self.stops or patterns)
        self._searches: list[Search] | None = None
        self._keep = max((len(needle) for _, needle in self.stops), default=1) - 1
        self._tail = b""

    def reset(self) -> None:
        """Forget what came so far: no match may begin before this place and end after it."""
        self._tail = b""
        for search in self._searches or ():
            search.reset()

    def push(self, data: bytes) -> str | None:
        """Add bytes; returns the stop string or pattern whose match is complete first (the longest of those ending
        together; then a string before a pattern).

        After a match the scanner is of no further use: the request ends there. Raises ConstraintError when looking
        for a pattern would cost more than its limits allow.
        """
        if not data or not self.looks:
            return None
        first = self._string_in(data)
        if self._searches is None:
            self._searches = [Search(search_pattern(pattern)) for pattern in self._patterns]
        for search in self._searches:
            match = search.push(data)
            if match is not None and (first is None or (match.end, -match.length) < first[:2]):
                first = (match.end, -match.length, search.pattern.pattern)
        return None if first is None else first[2]

    def _string_in(self, data: bytes) -> tuple[int, int, str] | None:
        """(bytes of data read, minus the length, the stop string)."""
        if not self.stops:
            return None
        window, before = self._tail + data, len(self._tail)
        first: tuple[int, int, str] | None = None
        for stop, needle in self.stops:
            at = window.find(needle, max(0, before - len(needle) + 1))
            if at >= 0:
                candidate = (at + len(needle) - before, -len(needle), stop)
                first = candidate if first is None else min(first, candidate)
        self._tail = window[-self._keep :] if self._keep else b""
        return first
