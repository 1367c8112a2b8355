"""Why a state ended: kept once, raised as a fresh ``ProgramError`` for everyone who asks."""

from __future__ import annotations

from dataclasses import dataclass

from trellis.errors import ProgramError


@dataclass(frozen=True)
class Failure:
    """program, variable: where it happened. cause: the real error. within: the place in another program, which ran in
    this one's body."""

    program: str
    variable: str | None
    cause: BaseException
    within: str = ""

    @staticmethod
    def of(program: str, variable: str | None, cause: BaseException) -> Failure:
        """A failure whose cause is never another ``ProgramError`` that only wraps the real one."""
        if not isinstance(cause, ProgramError) or cause.__cause__ is None:
            return Failure(program, variable, cause)
        if cause.program == program:
            return Failure(program, variable or cause.variable, cause.__cause__)
        inner = f", variable {cause.variable!r}" if cause.variable else ""
        return Failure(program, variable, cause.__cause__, f"program {cause.program!r}{inner}")

    def error(self, place: str = "") -> ProgramError:
        """A new exception (one instance raised in many threads would collect all their tracebacks)."""
        reason = f"{type(self.cause).__name__}: {self.cause}"
        where = [each for each in (place, self.within) if each]
        error = ProgramError(self.program, self.variable, ": ".join([*where, reason]))
        error.__cause__ = self.cause
        return error
