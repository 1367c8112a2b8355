"""What the language asks for, as arguments of the official client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trellis.errors import BackendError, InvalidRequestError
from trellis.frontend.backends.base import GenerateRequest, Segment
from trellis.frontend.backends.conversation import check_conversation
from trellis.frontend.backends.openai_dialects import Dialect
from trellis.frontend.backends.structured import StructuredOutput, structured


@dataclass(frozen=True)
class Call:
    """arguments: of the client's ``create``. output: the form in which a constrained text comes back."""

    arguments: dict[str, Any]
    output: StructuredOutput | None = None


def chat_call(request: GenerateRequest, dialect: Dialect, api: str) -> Call:
    """InvalidRequestError or ConstraintError for all that a chat API cannot do."""
    given = check_conversation(request.conversation, api, dialect.continues)
    if request.sampling.max_new_tokens == 0:
        raise InvalidRequestError("max_tokens", f"{api} writes at least one token")
    messages = [{"role": role, "content": content} for role, content in given.messages]
    arguments, extra = dialect.sampling(request.sampling, api)
    output = None
    if given.said:
        messages.append({"role": "assistant", "content": given.said})
        extra.update(add_generation_prompt=False, continue_final_message=True)
    if request.constraint is not None and dialect.constraint is None:
        output = structured(request.constraint, api)
        form = {"name": "answer", "schema": output.schema, "strict": output.strict}
        arguments["response_format"] = {"type": "json_schema", "json_schema": form}
    elif request.constraint is not None:
        extra.update(dialect.constrained(request.constraint, api))
    arguments.update({"messages": messages, dialect.length: request.sampling.max_new_tokens})
    if request.return_logprob:
        arguments["logprobs"] = True
        _name_tokens(request, dialect, api, extra)
        if request.top_logprobs_num:
            arguments["top_logprobs"] = request.top_logprobs_num
    return Call(_with_extra(arguments, extra), output)


def completion_call(request: GenerateRequest, dialect: Dialect, api: str, by_id: bool = True) -> Call:
    """by_id: whether tokens of log-probabilities are asked for by their ids, where the server can."""
    arguments, extra = dialect.sampling(request.sampling, api)
    if request.constraint is not None:
        extra.update(dialect.constrained(request.constraint, api))
    if request.token_healing and dialect.native:
        extra["token_healing"] = True
    arguments.update(prompt=prompt_text(request.prompt), max_tokens=request.sampling.max_new_tokens)
    if request.return_logprob:
        arguments["logprobs"] = request.top_logprobs_num
        if by_id:
            _name_tokens(request, dialect, api, extra)
    return Call(_with_extra(arguments, extra))


def prompt_text(prompt: tuple[Segment, ...]) -> str:
    """InvalidRequestError for an empty prompt."""
    texts = [segment for segment in prompt if isinstance(segment, str)]
    if len(texts) != len(prompt):
        raise BackendError("a completions API takes text, and a part of the prompt is token ids")
    if not any(texts):
        raise InvalidRequestError("prompt", "is empty; a prompt must have at least one token")
    return "".join(texts)


def _name_tokens(request: GenerateRequest, dialect: Dialect, api: str, extra: dict[str, Any]) -> None:
    if dialect.token_ids:
        extra["return_tokens_as_token_ids"] = True
    elif request.top_logprobs_num:
        reason = f"{api} tells alternatives by their text, not by token ids; use return_logprob alone"
        raise InvalidRequestError("top_logprobs_num", reason)


def _with_extra(arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "extra_body": extra} if extra else arguments
