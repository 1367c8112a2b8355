"""Every error as an HTTP answer: one JSON envelope on /v1, as OpenAI's clients expect it, and one elsewhere."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from trellis.errors import (
    BackendError,
    CapacityError,
    ConstraintError,
    InvalidRequestError,
    RequestAborted,
)

CLIENT_CLOSED = 499  # nobody reads it; it is for the access log
RETRY_AFTER = "1"  # seconds until a request that found the queue full may be sent again
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ModelNotFound(InvalidRequestError):
    """A /v1 request for a model that is not served here; HTTP 404."""


class ClientDisconnected(Exception):
    """The client is gone; its request was aborted."""


class JsonResponse(Response):
    """JSON by msgspec; what JSON cannot say (NaN, infinity) is null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def status_of(error: BaseException) -> int:
    if isinstance(error, HTTPException):
        return error.status_code
    if isinstance(error, ModelNotFound):
        return 404
    if isinstance(error, InvalidRequestError):
        return 400
    if isinstance(error, CapacityError):
        return error.status
    if isinstance(error, BackendError):
        return error.status or 500
    if isinstance(error, RequestAborted):
        return 409
    return CLIENT_CLOSED if isinstance(error, ClientDisconnected) else 500


def body_of(error: BaseException, openai: bool) -> dict[str, Any]:
    """The envelope: ``{"error": {...}}``. Native: message, type, field, code. OpenAI: message, type, param, code."""
    status = status_of(error)
    field = error.field if isinstance(error, InvalidRequestError) else None
    default = "invalid_request_error" if status < 500 else "server_error"
    code: str | None = None
    if isinstance(error, ConstraintError):
        code = f"constraint_{error.code}"
        if error.kind == "schema":
            field = "response_format" if openai else "json_schema"
    elif isinstance(error, ModelNotFound):
        code = "model_not_found"
    return {
        "error": {
            "message": _message(error),
            "type": TYPES.get(status, default),
            "param" if openai else "field": field,
            "code": code,
        }
    }


def is_openai(request: Request) -> bool:
    return request.url.path.startswith("/v1/") or request.url.path == "/v1"


def install_error_handlers(app: FastAPI) -> None:
    """All errors of all routes leave in the envelope."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = _explained(error, request)
        headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
        if isinstance(error, CapacityError) and error.status == 503:
            headers["Retry-After"] = RETRY_AFTER
        return JsonResponse(body_of(error, is_openai(request)), status_of(error), headers)

    for kind in (HTTPException, Exception, *_OURS):
        app.add_exception_handler(kind, answer)


_OURS = (InvalidRequestError, CapacityError, BackendError, RequestAborted, ClientDisconnected)


def _explained(error: HTTPException, request: Request) -> HTTPException:
    """What the router says of a path or method that it does not know, in more words."""
    method, path = request.method, request.url.path[:100]
    allowed = (error.headers or {}).get("Allow", "")
    details = {
        (404, "Not Found"): f"no such route: {path}; docs/server.md lists the routes",
        (405, "Method Not Allowed"): f"{path} takes {allowed}, not {method}",
    }
    return HTTPException(
        error.status_code, details.get((error.status_code, error.detail), error.detail), error.headers
    )


def _message(error: BaseException) -> str:
    if isinstance(error, HTTPException):
        return str(error.detail)
    if status_of(error) == 500 and not isinstance(error, BackendError):
        return f"internal error: {type(error).__name__}"  # the log has the rest
    return str(error)
