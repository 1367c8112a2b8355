"""Every error a user can meet. A leaf module: it imports nothing, so that each room can raise these."""

from __future__ import annotations


class TrellisError(Exception):
    """Root of all errors that Trellis raises on purpose."""


class InvalidRequestError(TrellisError):
    """A client mistake; HTTP 400.

    field: name of the offending field as the client wrote it, e.g. ``sampling_params.top_p``.
    reason: what was wrong and what would be right.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.field, self.reason)


class ConstraintError(InvalidRequestError):
    """A regex, choices, schema or grammar that is invalid, unsupported or over a limit; HTTP 400.

    code: machine-readable, one of ``syntax``, ``unsupported``, ``limit``, ``empty``, ``timeout``.
    where: place in the constraint, e.g. ``position 7`` or a JSON pointer.
    """

    def __init__(self, kind: str, code: str, where: str, reason: str) -> None:
        super().__init__(kind, f"{reason} (at {where})" if where else reason)
        self.kind = kind
        self.code = code
        self.where = where
        self.detail = reason

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:  # type: ignore[override]
        return type(self), (self.kind, self.code, self.where, self.detail)


class CapacityError(TrellisError):
    """The request cannot be taken.

    status: 400 when it can never fit, 503 (429 of some APIs) when it may fit later.
    retry_after: seconds after which it may, where the answer says so.
    """

    def __init__(self, reason: str, status: int = 503, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type, tuple[str, int, float | None]]:
        return type(self), (str(self), self.status, self.retry_after)


class BackendError(TrellisError):
    """The backend failed or answered with something that is not an answer.

    status: the HTTP status if there was one.
    """

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status

    def __reduce__(self) -> tuple[type, tuple[str, int | None]]:
        return type(self), (str(self), self.status)


class RequestAborted(TrellisError):
    """The request ended before it was complete: aborted by its client or by the server."""


class ModelLoadError(TrellisError):
    """A model could not be found or read; the command line exits with status 2."""


class ProgramError(TrellisError):
    """A program failed; ``__cause__`` is the real error.

    program: name of the program. variable: the variable that was being computed, if any.
    """

    def __init__(self, program: str, variable: str | None, reason: str) -> None:
        place = f"program {program!r}" + (f", variable {variable!r}" if variable else "")
        super().__init__(f"{place}: {reason}")
        self.program = program
        self.variable = variable
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str | None, str]]:
        return type(self), (self.program, self.variable, self.reason)
