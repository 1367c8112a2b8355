"""Server-sent events, from bytes cut anywhere."""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\r|\n")
MAX_EVENT = 64 << 20
"""Bytes of one event; a full context with 20 alternatives for every token is a tenth of it."""


class EventTooLong(Exception):
    """More bytes than any event has, and no end of it."""


class SSEParser:
    """``feed`` takes bytes as they come from the network and returns the data of every event that is complete.

    Lines end with LF, CR or CRLF (also when CR and LF come in different pieces); several data lines of one event are
    joined by LF; comments and other fields are ignored; a byte order mark at the start is dropped. What has no
    blank line after it is not an event. Follows the event-stream section of the HTML standard.

    Time is linear in the bytes, wherever they are cut. Raises EventTooLong when an event, or one line, has more
    than max_event bytes.
    """

    def __init__(self, max_event: int = MAX_EVENT) -> None:
        self._max_event = max_event
        self._rest = bytearray()  # a line that has not ended
        self._data: list[str] = []
        self._size = 0  # bytes of the lines in _data
        self._after_cr = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[str]:
        events = []
        *ended, rest = _LINE_END.split(self._whole_line_ends(chunk))
        for part in ended:
            # Bytes are split before they are decoded, so a character cut in two stays whole.
            line = (bytes(self._rest) + part).decode("utf-8", "replace")
            self._rest.clear()
            if self._at_start:
                line = line.removeprefix("\ufeff")
                self._at_start = False
            if line:
                self._take(line)
            elif self._data:
                events.append("\n".join(self._data))
                self._data, self._size = [], 0
            self._check_size()
        self._rest += rest
        self._check_size()
        return events

    def _whole_line_ends(self, chunk: bytes) -> bytes:
        """The chunk without the second half of a CRLF that began in the one before."""
        if chunk and self._after_cr:
            chunk, self._after_cr = chunk.removeprefix(b"\n"), False
        if chunk:
            self._after_cr = chunk.endswith(b"\r")
        return chunk

    def _take(self, line: str) -> None:
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
            self._size += len(line) + 1

    def _check_size(self) -> None:
        if self._size + len(self._rest) > self._max_event:
            raise EventTooLong(f"more than {self._max_event} bytes came without the end of an event")
