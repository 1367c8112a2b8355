"""``/v1/chat/completions``: bodies and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trellis.errors import InvalidRequestError
from trellis.runtime.manager.fields import Fields, kind_of
from trellis.runtime.manager.types import GenerateResult
from trellis.runtime.server.openai_protocol import (
    MAX_TOP_LOGPROBS,
    Length,
    Logprobs,
    OpenAIRequest,
    ending_of,
    read_request,
    usage_of,
)
from trellis.runtime.server.runtime import Runtime

MAX_MESSAGES = 8_192  # where the context length is not known
MAX_PARTS = 8_192  # of one message
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def parse_chat(raw: Any, runtime: Runtime) -> OpenAIRequest:
    """Raises InvalidRequestError."""
    fields = Fields(raw)
    messages = read_messages(fields, runtime.config.context_length or MAX_MESSAGES)
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
    if top and not wanted:
        raise fields.error("top_logprobs", "only with logprobs=true")
    fields.only("token_healing", (False,), "not supported: a chat's prompt ends where its template ends it")
    length = Length(_length_field(fields), None)
    text = _rendered(fields, messages, runtime)
    return read_request(fields, runtime, [("messages", text)], length, Logprobs(wanted, top), "chatcmpl")


def _rendered(fields: Fields, messages: list[dict[str, str]], runtime: Runtime) -> str:
    """The conversation as the model reads it: up to where its answer begins, or, with ``continue_final_message``, up
    to the end of the answer so far, which is the last message."""
    continues = fields.boolean("continue_final_message")
    prompts = fields.boolean("add_generation_prompt", not continues)
    if not continues:
        return runtime.tokenizer.render_chat(messages, add_generation_prompt=prompts)
    if prompts:
        raise fields.error("continue_final_message", "does not go with add_generation_prompt=true")
    if messages[-1]["role"] != "assistant":
        raise fields.error(
            "continue_final_message",
            f"the last message must be the assistant's, not {messages[-1]['role']!r}",
        )
    before = runtime.tokenizer.render_chat(messages[:-1], add_generation_prompt=True)
    return before + messages[-1]["content"]


def read_messages(fields: Fields, most: int) -> list[dict[str, str]]:
    """``messages`` as role and text. most: the context length, since every message is a token or more. Raises
    InvalidRequestError naming the message."""
    messages = fields.elements("messages")
    if not messages:
        raise fields.error("messages", "must have at least one message")
    if len(messages) > most:
        raise fields.error(
            "messages", f"has {len(messages)} messages; {most}, the context length, is the most"
        )
    return [_message(each, f"messages[{i}]") for i, each in enumerate(messages)]


class ChatShape:
    """How results look as chat completions."""

    def __init__(self, request: OpenAIRequest, token_bytes: Sequence[bytes]) -> None:
        self._request = request
        self._bytes = token_bytes

    def whole(self, results: Sequence[GenerateResult]) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": result.text, "refusal": None},
                "logprobs": self._logprobs(result),
                **ending_of(result),
            }
            for i, result in enumerate(results)
        ]
        request = self._request
        return {
            **request.envelope("chat.completion"),
            "choices": choices,
            "usage": usage_of(results, request.n),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before the first text of a choice."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, {"finish_reason": None})

    def piece(self, index: int, delta: GenerateResult) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text or delta.logprobs else {}
        return self._chunk(index, content, self._logprobs(delta), ending_of(delta))

    def usage(self, results: Sequence[GenerateResult]) -> dict[str, Any]:
        """The last chunk, if usage was asked for."""
        request = self._request
        envelope = request.envelope("chat.completion.chunk")
        return {**envelope, "choices": [], "usage": usage_of(results, request.n)}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any, ending: dict[str, Any]
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, **ending}
        return {**self._request.envelope("chat.completion.chunk"), "choices": [choice]}

    def _logprobs(self, result: GenerateResult) -> dict[str, Any] | None:
        if not self._request.logprobs or result.logprobs is None:
            return None
        tops = result.top_logprobs or [[]] * len(result.logprobs)
        return {
            "content": [
                {**self._token(token, logprob), "top_logprobs": [self._token(*pair) for pair in top]}
                for token, logprob, top in zip(result.token_ids, result.logprobs, tops, strict=False)
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self._bytes[token]
        name = f"token_id:{token}" if self._request.by_id else spelled.decode("utf-8", "replace")
        return {"token": name, "logprob": logprob, "bytes": list(spelled)}


def _message(raw: Any, path: str) -> dict[str, str]:
    fields = Fields(raw, path)
    role = fields.string("role")
    if role not in ROLES:
        raise fields.error("role", f"must be one of {', '.join(ROLES)}, not {role!r}")
    content = _content(fields)
    fields.only("name", (), "not supported: the model's chat template has no names")
    fields.only("tool_calls", ([],), "not supported: this server calls no tools")
    fields.only("refusal", (), "not supported")
    fields.only("audio", (), "not supported: this server's models read text")
    fields.done()
    return {"role": ROLES[role], "content": content}


def _content(fields: Fields) -> str:
    """A string, or a list of text parts."""
    raw = fields.get("content")
    if isinstance(raw, str):
        return fields.check_string(raw, "content")
    if not isinstance(raw, list):
        raise fields.error("content", f"must be a string or a list of text parts, not {kind_of(raw)}")
    texts = []
    for i, part in enumerate(fields.elements("content", MAX_PARTS)):
        piece = Fields(part, fields.name(f"content[{i}]"))
        kind = piece.string("type")
        if kind != "text":
            raise piece.error("type", f"must be 'text', not {kind!r}: this server's models read text")
        texts.append(piece.string("text", ""))
        piece.done()
    return "".join(texts)


def _length_field(fields: Fields) -> str:
    """Which of its two names the limit of new tokens has here."""
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise InvalidRequestError(
            "max_tokens", "max_completion_tokens is set too, and differs; give one of them"
        )
    return "max_tokens" if new is None else "max_completion_tokens"
