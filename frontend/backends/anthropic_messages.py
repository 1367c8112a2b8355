"""The Messages API of Anthropic: requests as arguments of the official client, and answers read."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from trellis.errors import BackendError, InvalidRequestError
from trellis.frontend.backends.base import Completion, Counts, GenerateRequest, SamplingOptions
from trellis.frontend.backends.conversation import check_conversation
from trellis.frontend.backends.openai_dialects import missing
from trellis.frontend.backends.openai_requests import Call
from trellis.frontend.backends.structured import StructuredOutput, check_choice, structured

_SAMPLING = ("temperature", "top_p", "top_k")
_ENDS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}
_DEFAULTS = SamplingOptions()


def message_call(request: GenerateRequest, api: str) -> Call:
    """InvalidRequestError or ConstraintError for all that the API cannot do."""
    if request.return_logprob:
        raise missing("return_logprob", api)
    system, messages = _messages(request, api)
    sampling = request.sampling
    arguments: dict[str, Any] = {"messages": messages, "max_tokens": sampling.max_new_tokens}
    if system:
        arguments["system"] = system
    if sampling.stop:
        arguments["stop_sequences"] = list(sampling.stop)
    extra = _sampling(sampling, api)
    output = None
    if request.constraint is not None:
        output = structured(request.constraint, api)
        if not output.strict:
            raise InvalidRequestError("strict", f"{api} enforces a schema or refuses it; leave strict out")
        extra["output_config"] = {"format": {"type": "json_schema", "schema": output.schema}}
    if extra:  # in the body, since not every version of the client names these
        arguments["extra_body"] = extra
    return Call(arguments, output)


def _messages(request: GenerateRequest, api: str) -> tuple[str, list[dict[str, str]]]:
    given = check_conversation(request.conversation, api, continues=True)
    messages = list(given.messages)
    first = next((i for i, (role, _) in enumerate(messages) if role != "system"), len(messages))
    system = "\n\n".join(content for _, content in messages[:first])
    rest = [{"role": role, "content": content} for role, content in messages[first:]]
    if any(message["role"] == "system" for message in rest):
        raise InvalidRequestError("role", f"{api} takes system messages before all others only")
    if not rest or rest[-1]["role"] != "user":
        raise InvalidRequestError(
            "role", f"{api} answers a user message; append user(...) before assistant(...)"
        )
    if given.said:
        if given.said != given.said.rstrip():
            reason = f"{api} cannot go on after blanks; end the text before the gen without them"
            raise InvalidRequestError("role", reason)
        rest.append({"role": "assistant", "content": given.said})
    return system, rest


def _sampling(sampling: SamplingOptions, api: str) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    for each in fields(sampling):
        value = getattr(sampling, each.name)
        if each.name in ("max_new_tokens", "stop") or value == getattr(_DEFAULTS, each.name):
            continue
        if each.name not in _SAMPLING:
            raise missing(each.name, api)
        extra[each.name] = value
    return extra


@dataclass
class MessageAnswer:
    """An answer, whole or by its events."""

    request: GenerateRequest
    api: str
    output: StructuredOutput | None
    _texts: list[str] = field(default_factory=list)
    _reason: str | None = None
    _matched: str | None = None
    _usage: dict[str, int] = field(default_factory=dict)

    def add_message(self, message: Any) -> None:
        self._texts += [block.text for block in message.content if block.type == "text"]
        self._reason, self._matched = message.stop_reason, message.stop_sequence
        self._add_usage(message.usage)

    def add_event(self, event: Any) -> str:
        """Returns the text that can be shown already."""
        if event.type == "message_start":
            self._add_usage(event.message.usage)
        elif event.type == "message_delta":
            self._reason, self._matched = event.delta.stop_reason, event.delta.stop_sequence
            self._add_usage(event.usage)
        elif event.type == "content_block_delta" and event.delta.type == "text_delta":
            self._texts.append(event.delta.text)
            if self.output is None or not self.output.wrapped:
                return str(event.delta.text)
        return ""

    def _add_usage(self, usage: Any) -> None:
        # Events give totals so far, and leave out what they do not tell.
        for name in (
            "input_tokens",
            "cache_read_input_tokens",
            "cache_creation_input_tokens",
            "output_tokens",
        ):
            if isinstance(value := getattr(usage, name, None), int):
                self._usage[name] = value

    def complete(self) -> Completion:
        """BackendError for an answer that did not end, or not as a text ends."""
        if self._reason is None:
            raise BackendError(f"{self.api}: the answer ended before it was complete")
        if self._reason == "refusal":
            raise BackendError(f"{self.api}: the model refused to answer")
        if self._reason not in _ENDS:
            raise BackendError(
                f"{self.api}: the answer ended with {self._reason!r}, which is no end of a text"
            )
        text, finish = "".join(self._texts), _ENDS[self._reason]
        if self.output is not None:
            text = self.output.text(text)
        check_choice(self.request.constraint, text, finish, self.api)
        return Completion(
            text=text,
            finish_reason=finish,
            matched=self._matched,
            counts=self._counts(),
            grammar_engine=self.api if self.output is not None else None,
        )

    def _counts(self) -> Counts:
        """The API's input_tokens are those that no cache had a part in."""
        cached, new = self._usage.get("cache_read_input_tokens", 0), self._usage.get("output_tokens", 0)
        computed = self._usage.get("input_tokens", 0) + self._usage.get("cache_creation_input_tokens", 0)
        return Counts(
            prompt_tokens=computed + cached,
            cached_tokens=cached,
            completion_tokens=new,
            sampled_tokens=new,
        )
