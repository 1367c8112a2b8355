"""Why a state ended: kept once, raised as a fresh ``ProgramError`` for everyone who asks."""

from __future__ import annotations

from dataclasses import dataclass

from trellis.errors import ProgramError


@dataclass(frozen=True)
class Failure:
    """program, variable: where it happened. cause: the real error."""

    program: str
    variable: str | None
    cause: BaseException

    @staticmethod
    def of(program: str, variable: str | None, cause: BaseException) -> Failure:
        """A failure whose cause is never another ``ProgramError`` that only wraps the real one."""
        if isinstance(cause, ProgramError) and cause.__cause__ is not None:
            return Failure(program, variable or cause.variable, cause.__cause__)
        return Failure(program, variable, cause)

    def error(self, place: str = "") -> ProgramError:
        """A new exception (one instance raised in many threads would collect all their tracebacks)."""
        reason = f"{type(self.cause).__name__}: {self.cause}"
        error = ProgramError(self.program, self.variable, f"{place}: {reason}" if place else reason)
        error.__cause__ = self.cause
        return error
