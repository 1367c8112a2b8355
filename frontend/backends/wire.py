"""The runtime's JSON, to and from the language's own structures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trellis.errors import (
    BackendError,
    CapacityError,
    ConstraintError,
    InvalidRequestError,
    RequestAborted,
    TrellisError,
)
from trellis.frontend.backends.base import (
    ChatFormat,
    Completion,
    Counts,
    GenerateRequest,
    ModelInfo,
    OptionScore,
    ScoreResult,
    Segment,
)

Json = Mapping[str, Any]
_CONSTRAINT = "constraint_"


def segments(prompt: Sequence[Segment]) -> list[str | list[int]]:
    return [segment if isinstance(segment, str) else list(segment) for segment in prompt]


def generate_body(request: GenerateRequest, stream: bool) -> dict[str, Any]:
    """Body of ``POST /generate``."""
    sampling = {name: value for name, value in asdict(request.sampling).items() if value is not None}
    if request.constraint is not None:
        source = request.constraint.source
        sampling[request.constraint.kind] = (
            json.loads(source) if request.constraint.kind == "choices" else source
        )
    body: dict[str, Any] = {"segments": segments(request.prompt), "sampling_params": sampling}
    if stream:
        body["stream"] = True
    if request.return_logprob:
        body["return_logprob"] = True
        body["top_logprobs_num"] = request.top_logprobs_num
    return body


def completion(answer: Json) -> Completion:
    """A whole answer of ``/generate``. Raises what its finish reason says, if the request did not end well."""
    try:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        raise_for_finish(reason)
        logprobs = meta.get("output_token_logprobs")
        top = meta.get("output_top_logprobs")
        return Completion(
            text=answer["text"],
            token_ids=tuple(answer.get("output_ids") or ()),
            finish_reason=reason["type"],
            matched=reason.get("matched"),
            counts=counts(meta),
            kept_tokens=meta.get("kept_tokens", 0),
            tail_text=meta.get("tail_text", ""),
            logprobs=None if logprobs is None else tuple(_logprob(entry[0]) for entry in logprobs),
            top_logprobs=None if top is None else tuple(_alternatives(entry) for entry in top),
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise BackendError(
            f"the server's answer is not a /generate answer ({error!r}): {_short(answer)}"
        ) from error


def score_result(answer: Json) -> ScoreResult:
    """An answer of ``/score``."""
    try:
        options = tuple(
            OptionScore(tuple(option["token_ids"]), tuple(_logprob(value) for value in option["logprobs"]))
            for option in answer["options"]
        )
        return ScoreResult(options, counts(answer.get("meta_info") or {}))
    except (KeyError, TypeError, AttributeError) as error:
        raise BackendError(
            f"the server's answer is not a /score answer ({error!r}): {_short(answer)}"
        ) from error


def model_info(answer: Json) -> ModelInfo:
    """An answer of ``/get_model_info``."""
    try:
        chat = answer.get("chat_format")
        chat_format = ChatFormat()
        if chat is not None:
            roles = {role: (prefix, suffix) for role, (prefix, suffix) in chat["roles"].items()}
            chat_format = ChatFormat(roles, chat.get("default_system", ""), chat.get("begin", ""))
        return ModelInfo(answer["model_path"], chat_format, answer.get("context_length"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"the server's answer is not a /get_model_info answer ({error!r}): {_short(answer)}"
        raise BackendError(reason) from error


def counts(meta: Json) -> Counts:
    names = Counts.__dataclass_fields__
    return Counts(**{name: meta[name] for name in names if name in meta})


def raise_for_finish(reason: Json) -> None:
    """``abort`` and ``error`` are no answers: raise the error that they stand for."""
    if reason["type"] not in ("abort", "error"):
        return
    message, status = reason.get("message") or "the request ended early", reason.get("status")
    if status == 400:
        raise InvalidRequestError("request", message)
    if status == 503:
        raise CapacityError(message, 503)
    if reason["type"] == "abort":
        raise RequestAborted(message)
    raise BackendError(message, status)


def error_from(status: int, content: bytes) -> TrellisError:
    """The error that an HTTP answer with status >= 400 stands for. Anything but the runtime's own
    ``{"error": {...}}`` is shown as it is."""
    text = content.decode("utf-8", "replace").strip()
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    return error_of(error if isinstance(error, dict) else {"message": text[:500]}, status)


def error_of(error: Json, status: int | None = None) -> TrellisError:
    """The runtime's error object: message, type, field, code. status: None inside a stream, which has none."""
    message = str(error.get("message") or f"HTTP status {status}")
    field, code = error.get("field") or error.get("param"), str(error.get("code") or "")
    client = error.get("type") == "invalid_request_error"
    if field and code.startswith(_CONSTRAINT):
        reason, _, where = message.removeprefix(f"{field}: ").removesuffix(")").rpartition(" (at ")
        if not reason:  # no place was given
            reason, where = message.removeprefix(f"{field}: "), ""
        return ConstraintError(str(field), code.removeprefix(_CONSTRAINT), where, reason)
    if field:
        return InvalidRequestError(str(field), message.removeprefix(f"{field}: "))
    if status in (429, 503):
        return CapacityError(message, status)
    if status == 409:
        return RequestAborted(message)
    if client and status in (400, None):  # no field is at fault: the request is too big for this server
        return CapacityError(message, 400)
    return BackendError(message if status is None else f"HTTP {status}: {message}", status)


def _logprob(value: float | None) -> float:
    """JSON has no infinity: null is a token that cannot come."""
    return -math.inf if value is None else float(value)


def _alternatives(entry: Sequence[Sequence[Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(alternative[1]), _logprob(alternative[0])) for alternative in entry or ())


def _short(answer: object) -> str:
    text = repr(answer)
    return text if len(text) <= 200 else text[:200] + "..."
