"""The exceptions of the official API clients → the errors of the language."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from trellis.errors import BackendError, CapacityError, InvalidRequestError, RequestAborted, TrellisError
from trellis.frontend.backends.errors import error_of

_CLIENTS = {"openai", "anthropic", "litellm", "httpx", "httpx2", "httpcore", "httpcore2", "json"}


@contextlib.contextmanager
def api_errors(api: str, model: str, timeout: float | None) -> Iterator[None]:
    """Raises the language's errors for those of a client that is called inside.

    api: the API's name and address, which stand in front of every reason.
    """
    try:
        yield
    except TrellisError:
        raise
    except UnicodeEncodeError as error:
        raise InvalidRequestError("prompt", f"is not valid Unicode: {error.reason}") from None
    except Exception as error:
        roots = {each.__module__.partition(".")[0] for each in type(error).__mro__}
        if not roots & _CLIENTS:
            raise
        # The client's own trace is its inner workings, and the reason says all of it.
        raise api_error(error, api, model, timeout) from None


def api_error(error: Exception, api: str, model: str, timeout: float | None) -> TrellisError:
    """Goes by what the clients of all these APIs have in common (names of classes, ``status_code``, ``body``), so
    that it needs none of them."""
    names = {each.__name__ for each in type(error).__mro__}
    if names & {"APITimeoutError", "TimeoutException"}:
        limit = "" if timeout is None else f" of {timeout:g} s"
        return BackendError(f"{api}: no answer within its timeout{limit}")
    status = getattr(error, "status_code", None)
    body = _inner(getattr(error, "body", None))
    message = str(body.get("message") or error)
    if "APIConnectionError" in names or (not isinstance(status, int) and names & {"TransportError"}):
        reason = error.__cause__ or error
        return BackendError(f"{api}: the connection failed: {type(reason).__name__}: {reason}")
    if not isinstance(status, int):
        if body:
            return error_of(body, api)  # an error in the middle of a stream, which has no status
        return BackendError(f"{api}: {type(error).__name__}: {message}")
    return _of_status(status, message, body, api, model, _retry_after(error))


def _of_status(
    status: int, message: str, body: Mapping[str, Any], api: str, model: str, retry_after: float | None
) -> TrellisError:
    reason = f"{api}: HTTP {status}: {message}"
    if status in (401, 403):
        return BackendError(f"{reason}; check the API key", status)
    if status == 404:
        return BackendError(
            f"{reason}; is there a model {model!r}, and is base_url the API's (/v1 at its end)?", status
        )
    if status == 409:
        return RequestAborted(reason)
    if status in (429, 503, 529):
        wait = "" if retry_after is None else f"; retry after {retry_after:g} s"
        return CapacityError(reason + wait, status, retry_after)
    if status in (400, 413, 422):
        if status == 413 or body.get("code") == "context_length_exceeded":
            return CapacityError(reason, 400)
        if body.get("param") or body.get("field"):
            return error_of(body, api, status)
        return InvalidRequestError("request", reason)
    return BackendError(reason, status)


def _inner(body: Any) -> Mapping[str, Any]:
    """The error object of a body; some clients unwrap it, some do not."""
    if isinstance(body, Mapping):
        inner = body.get("error")
        return inner if isinstance(inner, Mapping) else body
    return {}


def _retry_after(error: Exception) -> float | None:
    """Seconds, as the answer's ``Retry-After`` says."""
    headers: Any = getattr(getattr(error, "response", None), "headers", None)
    try:
        seconds = float(headers.get("retry-after"))
    except (AttributeError, TypeError, ValueError):
        return None
    return seconds if 0 <= seconds < 1e9 else None
