"""Server-sent events, from bytes cut anywhere."""

from __future__ import annotations


class SSEParser:
    """``feed`` takes bytes as they come from the network and returns the data of every event that is complete.

    Lines end with LF, CR or CRLF (also when CR and LF come in different pieces); several data lines of one event are
    joined by LF; comments and other fields are ignored; a byte order mark at the start is dropped. What has no
    blank line after it is not an event. Follows the event-stream section of the HTML standard.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._after_cr = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[str]:
        events = []
        for line in self._lines(chunk):
            if not line:
                if self._data:
                    events.append("\n".join(self._data))
                    self._data = []
            elif line.startswith("data"):
                self._take(line)
        return events

    def _take(self, line: str) -> None:
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))

    def _lines(self, chunk: bytes) -> list[str]:
        if not chunk:
            return []
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # the second half of a CRLF
            self._after_cr = False
            if not chunk:
                return []
        self._after_cr = chunk.endswith(b"\r")
        # Bytes are split before they are decoded, so a character cut in two stays whole.
        text = self._rest + chunk
        parts = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = parts.pop()
        lines = [part.decode("utf-8", "replace") for part in parts]
        if lines and self._at_start:
            lines[0] = lines[0].removeprefix("\ufeff")
            self._at_start = False
        return lines
