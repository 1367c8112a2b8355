"""``/v1/completions``: bodies and answers."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from trellis.runtime.manager.bounds import check_sequences
from trellis.runtime.manager.fields import Fields, kind_of
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
    prompts = _prompts(fields, runtime.config.max_requests)
    echo = fields.boolean("echo")
    top = fields.integer("logprobs", None, 0, MAX_TOP_LOGPROBS)
    logprobs = Logprobs(top is not None, top or 0, of_prompt=echo and top is not None)
    length = Length("max_tokens", DEFAULT_MAX_TOKENS)
    healing = fields.boolean("token_healing")
    return read_request(fields, runtime, prompts, length, logprobs, "cmpl", echo, healing)


class CompletionShape:
    """How results look as completions."""

    def __init__(self, request: OpenAIRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._places: dict[int, _Place] = {}  # where the next token of each choice begins

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
        """Four parallel lists over the prompt's tokens (with echo) and the new ones. The first token of a text has no
        log-probability and no alternatives."""
        new = len(result.logprobs or ())
        prompt = result.input_token_ids or []
        ids = [*prompt, *result.token_ids[:new]]
        values = [*(result.input_logprobs or ()), *(result.logprobs or ())]
        tops: list[TopLogprobs | None] = list(result.input_top_logprobs or [None] * len(prompt))
        tops += result.top_logprobs or [None] * new
        return {
            "tokens": [self._spell(token) for token in ids],
            "token_logprobs": values,
            "top_logprobs": [
                None if top is None else {self._spell(token): value for token, value in top} for top in tops
            ],
            "text_offset": self._text_offsets(
                index, prompt, result.token_ids[:new], result.healed_characters
            ),
        }

    def _text_offsets(self, index: int, prompt: Sequence[int], new: Sequence[int], healed: int) -> list[int]:
        """Where each token begins in the text of the choice, in characters. A token that goes on with a character
        that an earlier one began stands where that character stands.

        healed: the new tokens begin with so many characters of the prompt, which are not in the text.
        """
        item = self._request.inputs[index]
        place = self._places.setdefault(index, _Place())
        hidden = self._tokenizer.special_token_ids if item.params.skip_special_tokens else frozenset()
        unseen = (
            frozenset[int]() if _begins_with_bos(item, self._tokenizer) else {self._tokenizer.bos_token_id}
        )
        spelled = self._tokenizer.token_bytes
        offsets = [place.add(b"" if i == 0 and t in unseen else spelled[t]) for i, t in enumerate(prompt)]
        if prompt:
            place.close()
        return offsets + [max(0, place.add(b"" if t in hidden else spelled[t]) - healed) for t in new]

    def _spell(self, token: int) -> str:
        if self._request.by_id:
            return f"token_id:{token}"
        return self._tokenizer.token_bytes[token].decode("utf-8", "replace")


class _Place:
    """Characters of a text that grows by the bytes of its tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def add(self, data: bytes) -> int:
        """How many characters were complete before these bytes."""
        before = self._characters
        self._characters += len(self._decoder.decode(data))
        return before

    def close(self) -> None:
        """What follows is decoded on its own."""
        self._characters += len(self._decoder.decode(b"", final=True))


def _begins_with_bos(item: GenerateInput, tokenizer: Tokenizer) -> bool:
    """Whether the prompt's text has the BOS token in it, if the first token is that."""
    bos = tokenizer.bos_token_id
    if bos is None or not isinstance(item.prompt, str):
        return True
    return item.prompt.encode().startswith(tokenizer.token_bytes[bos])


def prompt_text(item: GenerateInput, tokenizer: Tokenizer) -> str:
    """The prompt as the client would read it."""
    if isinstance(item.prompt, str):
        return item.prompt
    ids = [token for token in item.prompt if isinstance(token, int)]
    return tokenizer.decode(ids, skip_special_tokens=False)


def _prompts(fields: Fields, most: int) -> list[tuple[str, Prompt]]:
    """``prompt``: a text, a list of texts, a list of ids, or a list of those."""
    raw = fields.get("prompt")
    if raw is None:
        raise fields.error("prompt", "is missing")
    if isinstance(raw, str):
        return [("prompt", fields.check_string(raw, "prompt"))]
    elements = fields.elements("prompt")
    if not elements:
        raise fields.error("prompt", "is empty; a prompt must have at least one token")
    if type(elements[0]) is int:
        return [("prompt", _ids(fields, elements, "prompt"))]
    check_sequences(len(elements), most, "prompt")
    prompts: list[tuple[str, Prompt]] = []
    for i, each in enumerate(elements):
        place = f"prompt[{i}]"
        if not isinstance(each, (str, list)):
            raise fields.error(place, f"must be a text or a list of token ids, not {kind_of(each)}")
        prompts.append((place, each if isinstance(each, str) else _ids(fields, each, place)))
    return prompts


def _ids(fields: Fields, value: list[Any], place: str) -> list[int]:
    """Whether they are in the vocabulary is checked when they are encoded."""
    wrong = next((i for i, each in enumerate(value) if type(each) is not int), None)
    if wrong is not None:
        raise fields.error(f"{place}[{wrong}]", f"must be a token id, not {kind_of(value[wrong])}")
    return value
