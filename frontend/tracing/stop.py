"""Why a trace ended before the program's body did."""

from __future__ import annotations

from dataclasses import dataclass


class Untraceable(BaseException):
    """Raised inside a traced body where the trace cannot go on.

    Not an ``Exception``: a body that catches those must not go on with a trace that has ended.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Stop:
    """file, line: the place in the program's source, if it is known. reason: what the program does there."""

    reason: str
    file: str | None = None
    line: int | None = None

    @property
    def place(self) -> str:
        if self.line is None:
            return ""
        return f"line {self.line} of {self.file}" if self.file else f"line {self.line}"

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}" if self.place else self.reason
