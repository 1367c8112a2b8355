"""The runtime's errors, as they come over HTTP → the errors that they stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trellis.errors import (
    BackendError,
    CapacityError,
    ConstraintError,
    InvalidRequestError,
    RequestAborted,
    TrellisError,
)
from trellis.frontend.backends.shown import shown

_CONSTRAINT = "constraint_"
_HINTS = {
    404: "; is this a Trellis server? give its base URL, without /v1",
    405: "; is this a Trellis server? give its base URL, without /v1",
}


def raise_for_finish(kind: str, message: str | None, status: int | None) -> None:
    """``abort`` and ``error`` are no answers: raise the error that they stand for."""
    if kind not in ("abort", "error"):
        return
    message = message or "the request ended early"
    if status == 400:
        raise InvalidRequestError("request", message)
    if status == 503:
        raise CapacityError(message, 503)
    if kind == "abort":
        raise RequestAborted(message)
    raise BackendError(message, status)


def error_from(status: int, content: bytes, url: str) -> TrellisError:
    """The error that an HTTP answer of any status but 2xx stands for. Anything but the runtime's own
    ``{"error": {...}}`` is shown as it is."""
    if status < 400:
        return BackendError(
            f"{url}: HTTP {status}: redirects are not followed; give the server's own URL", status
        )
    text = content[:100_000].decode("utf-8", "replace").strip()
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    return error_of(error if isinstance(error, dict) else {"message": text[:500]}, url, status)


def error_of(error: Any, url: str, status: int | None = None) -> TrellisError:
    """The runtime's error object: message, type, field, code. status: None inside a stream, which has none."""
    if not isinstance(error, Mapping):
        error = {"message": error}
    message = _word(error.get("message"))
    field = error.get("field") or error.get("param")
    if isinstance(field, str) and field:
        return _of_field(field, message, _word(error.get("code")))
    reason = f"{url}: {message or 'no reason given'}"
    if status in (429, 503):
        return CapacityError(reason, status)
    if status == 409:
        return RequestAborted(reason)
    if error.get("type") == "invalid_request_error" and status in (400, None):
        return CapacityError(reason, 400)  # no field is at fault: the request is too big for this server
    if status is None:
        return BackendError(reason)
    what = f": {message}" if message else ""
    return BackendError(f"{url}: HTTP {status}{what}{_HINTS.get(status, '')}", status)


def _of_field(field: str, message: str, code: str) -> InvalidRequestError:
    """A mistake in a request, by the names that the language has for what the wire calls otherwise."""
    known = "schema" if field in ("json_schema", "response_format") else field
    if known.partition("[")[0] == "segments":
        known = "prompt" + known.removeprefix("segments")
    message = message.removeprefix(f"{field}: ").removeprefix(f"{known}: ")
    if not code.startswith(_CONSTRAINT):
        return InvalidRequestError(known, message)
    reason, _, where = message.removesuffix(")").rpartition(" (at ")
    if not reason:  # no place was given
        reason, where = message, ""
    return ConstraintError(known, code.removeprefix(_CONSTRAINT), where, reason)


def _word(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else shown(value, 500)
