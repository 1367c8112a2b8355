"""Stop strings, found in the bytes of the output while it grows.

Bytes, not text: a token may hold a part of a character, and a stop string may begin in one token and end in
another. A match is reported as soon as its last byte is there, so the result does not depend on how the text
was cut into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Looks for any of the stop strings in a stream of bytes.

    Only the last ``longest - 1`` bytes are kept, so each push costs O(len(data) + longest) however long the
    output is.
    """

    __slots__ = ("_keep", "_tail", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [(stop, stop.encode("utf-8", "surrogatepass")) for stop in stops if stop]
        self._keep = max((len(needle) for _, needle in self.stops), default=1) - 1
        self._tail = b""

    def reset(self) -> None:
        """Forget what came so far: no stop string may begin before this place and end after it."""
        self._tail = b""

    def push(self, data: bytes) -> str | None:
        """Add bytes; returns the stop string that is complete first (the longest of those ending together).

        After a match the scanner is of no further use: the request ends there.
        """
        if not self.stops or not data:
            return None
        window = self._tail + data
        first: tuple[int, int, str] | None = None
        for stop, needle in self.stops:
            at = window.find(needle, max(0, len(self._tail) - len(needle) + 1))
            if at >= 0:
                candidate = (at + len(needle), -len(needle), stop)
                first = candidate if first is None else min(first, candidate)
        self._tail = window[-self._keep :] if self._keep else b""
        return None if first is None else first[2]
