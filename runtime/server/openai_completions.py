"""``/v1/completions``: bodies and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trellis.runtime.manager.fields import Fields
from trellis.runtime.manager.types import GenerateInput, GenerateResult, Prompt
from trellis.runtime.messages import TopLogprobs
from trellis.runtime.models import Tokenizer
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

DEFAULT_MAX_TOKENS = 16


def parse_completion(raw: Any, runtime: Runtime) -> OpenAIRequest:
    """Raises InvalidRequestError."""
    fields = Fields(raw)
    prompts = _prompts(fields)
    echo = fields.boolean("echo")
    top = fields.integer("logprobs", None, 0, MAX_TOP_LOGPROBS)
    logprobs = Logprobs(top is not None, top or 0, of_prompt=echo and top is not None)
    length = Length("max_tokens", DEFAULT_MAX_TOKENS)
    return read_request(fields, runtime, prompts, length, logprobs, "cmpl", echo)


class CompletionShape:
    """How results look as completions."""

    def __init__(self, request: OpenAIRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._offsets: dict[int, int] = {}  # characters of each choice that were sent

    def whole(self, results: Sequence[GenerateResult]) -> dict[str, Any]:
        choices = [self._choice(i, self._echo(i) + result.text, result) for i, result in enumerate(results)]
        request = self._request
        return {
            **request.envelope("text_completion"),
            "choices": choices,
            "usage": usage_of(results, request.n),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """The echo of the prompt; its logprobs come with the first piece."""
        text = self._echo(index)
        return (
            self._chunk({"index": index, "text": text, "logprobs": None, "finish_reason": None})
            if text
            else None
        )

    def piece(self, index: int, delta: GenerateResult) -> dict[str, Any]:
        return self._chunk(self._choice(index, delta.text, delta))

    def usage(self, results: Sequence[GenerateResult]) -> dict[str, Any]:
        """The last chunk, if usage was asked for."""
        request = self._request
        return {**request.envelope("text_completion"), "choices": [], "usage": usage_of(results, request.n)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._request.envelope("text_completion"), "choices": [choice]}

    def _choice(self, index: int, text: str, result: GenerateResult) -> dict[str, Any]:
        logprobs = self._logprobs(index, result) if self._request.logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, **ending_of(result)}

    def _echo(self, index: int) -> str:
        return prompt_text(self._request.inputs[index], self._tokenizer) if self._request.echo else ""

    def _logprobs(self, index: int, result: GenerateResult) -> dict[str, Any]:
        """Four parallel lists over the prompt's tokens (with echo) and the new ones.

        The alternatives of prompt tokens are not computed; they are null.
        """
        new = len(result.logprobs or ())
        ids = [*(result.input_token_ids or ()), *result.token_ids[:new]]
        values = [*(result.input_logprobs or ()), *(result.logprobs or ())]
        tops: list[TopLogprobs | None] = [None] * len(result.input_token_ids or ())
        tops += result.top_logprobs or [None] * new
        tokens, offsets = [], []
        offset = self._offsets.get(index, 0)
        for token in ids:
            tokens.append(self._spell(token))
            offsets.append(offset)
            offset += len(tokens[-1])
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": [
                None if top is None else {self._spell(token): value for token, value in top} for top in tops
            ],
            "text_offset": offsets,
        }

    def _spell(self, token: int) -> str:
        return self._tokenizer.token_bytes[token].decode("utf-8", "replace")


def prompt_text(item: GenerateInput, tokenizer: Tokenizer) -> str:
    """The prompt as the client would read it."""
    if isinstance(item.prompt, str):
        return item.prompt
    ids = [token for token in item.prompt if isinstance(token, int)]
    return tokenizer.decode(ids, skip_special_tokens=False)


def _prompts(fields: Fields) -> list[tuple[str, Prompt]]:
    """``prompt``: a text, a list of texts, a list of ids, or a list of those."""
    raw = fields.get("prompt")
    if raw is None:
        raise fields.error("prompt", "is missing")
    if isinstance(raw, str):
        return [("prompt", fields.check_string(raw, "prompt"))]
    elements = fields.elements("prompt")
    if not elements:
        raise fields.error("prompt", "is empty; a prompt must have at least one token")
    if all(isinstance(each, int) for each in elements):
        return [("prompt", elements)]
    prompts: list[tuple[str, Prompt]] = []
    for i, each in enumerate(elements):
        ids = isinstance(each, list) and all(isinstance(token, int) for token in each)
        if not (ids or isinstance(each, str)):
            raise fields.error(f"prompt[{i}]", "must be a text or a list of token ids")
        prompts.append((f"prompt[{i}]", each))
    return prompts
