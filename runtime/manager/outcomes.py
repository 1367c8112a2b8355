"""Finish reasons that are errors → the errors."""

from __future__ import annotations

import re

from trellis.errors import BackendError, CapacityError, ConstraintError, TrellisError
from trellis.fsm.search import STOP_REGEX
from trellis.runtime.messages import FinishReason, GenerateCommand


def error_of(finish: FinishReason, command: GenerateCommand) -> TrellisError | None:
    """The error that a finish reason stands for, if it does."""
    if finish.type not in ("error", "abort") or (finish.type == "abort" and finish.status is None):
        return None
    message = finish.message or "the request failed"
    if finish.status == 400:
        return _constraint_error(message, finish.code, command) or CapacityError(message, 400)
    if finish.status == 503:
        return CapacityError(message)
    return BackendError(message, finish.status or 500)


def _constraint_error(message: str, code: str | None, command: GenerateCommand) -> ConstraintError | None:
    """The text of a ConstraintError, ``kind: reason (at where)``, made into one again."""
    kind = command.constraint.kind if command.constraint else ""
    if message.startswith(f"{STOP_REGEX}: "):
        kind = STOP_REGEX
    text = message.removeprefix(f"{kind}: ")
    if not kind or text == message:
        return None
    parts = re.fullmatch(r"(.*) \(at (.*)\)", text, re.DOTALL)
    reason, where = parts.groups() if parts else (text, "")
    return ConstraintError(kind, code or "invalid", where, reason)
