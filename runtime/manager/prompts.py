"""Prompts as callers write them → token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from trellis.errors import InvalidRequestError
from trellis.fsm.contract import Vocabulary
from trellis.runtime.manager.bounds import Abandoned, check_options, never
from trellis.runtime.manager.fields import brief, check_text, kind_of
from trellis.runtime.manager.healing import exits
from trellis.runtime.manager.types import GenerateInput, Prompt, Segment

LONG_TEXT = 16_384  # characters or ids; encoding more would be felt by everybody else on the event loop


class PromptTokenizer(Protocol):
    """What the manager needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def token_bytes(self) -> Sequence[bytes]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def vocabulary(self) -> Vocabulary: ...


class EncodedPrompt(NamedTuple):
    """ids: the whole prompt. healing: how many of the last may be taken back (see ``GenerateCommand``)."""

    ids: list[int]
    healing: list[int]


class PromptEncoder:
    """Checks and encodes prompts.

    max_tokens: longest prompt of use, the context length, or so many of them; a text that must be longer is refused before it is
    tokenized.
    """

    def __init__(self, tokenizer: PromptTokenizer, context_length: int, contexts: int = 1) -> None:
        max_tokens = context_length * contexts
        self._tokenizer = tokenizer
        self._limit = "the context length" if contexts == 1 else f"{contexts} times the context length"
        self._longest = max_tokens - 1 if contexts == 1 else max_tokens  # the first leaves room for an answer
        self._max_tokens = max_tokens
        self._max_bytes = max_tokens * max(map(len, tokenizer.token_bytes), default=1)

    def segments(self, prompt: Prompt, field: str) -> list[str | list[int]]:
        """The prompt as segments, checked: adjacent texts merged, nothing empty.

        Raises InvalidRequestError naming ``field``.
        """
        if not isinstance(prompt, Sequence):
            raise InvalidRequestError(field, f"must be text, token ids or segments, not {kind_of(prompt)}")
        if isinstance(prompt, str) or set(map(type, prompt)) <= {int}:
            self._check_length(field, [prompt])
            return _merged([self._checked(prompt, field)])
        self._check_length(field, prompt)
        return _merged([self._checked(part, f"{field}[{i}]") for i, part in enumerate(prompt)])

    def encode_all(
        self, requests: Sequence[GenerateInput], left: Callable[[], bool] = never
    ) -> list[EncodedPrompt]:
        """Every prompt in tokens. Equal texts are tokenized once, and samples of one prompt share a list.

        Raises InvalidRequestError, and Abandoned as soon as ``left()``.
        """
        known: dict[tuple[str | int, bool], EncodedPrompt] = {}
        encoded = []
        for each in requests:
            heals = each.heals
            key = (each.prompt if isinstance(each.prompt, str) else id(each.prompt), heals)
            if key not in known:
                if left():
                    raise Abandoned
                segments = self.segments(each.prompt, each.prompt_field)
                ids = self.encode(segments)
                known[key] = EncodedPrompt(ids, self._healing(segments, ids) if heals else [])
            encoded.append(known[key])
        return encoded

    def encode(self, segments: Sequence[str | list[int]]) -> list[int]:
        """Each text is tokenized on its own, token ids are taken as they are; BOS only at the very start."""
        ids: list[int] = []
        for i, segment in enumerate(segments):
            if isinstance(segment, str):
                ids += self._tokenizer.encode(segment, add_special_tokens=i == 0)
            else:
                ids += segment
        return ids

    def _healing(self, segments: Sequence[str | list[int]], ids: Sequence[int]) -> list[int]:
        """Ids that came as ids are never taken back, only what the last text was tokenized to."""
        if not segments or not isinstance(segments[-1], str):
            return []
        first = len(segments) == 1
        encode = partial(self._tokenizer.encode, add_special_tokens=first)
        own = encode(segments[-1]) if not first else ids
        return exits(segments[-1], own, self._tokenizer.vocabulary(), encode, keep=first)

    def joint(
        self, prompt: Prompt, options: Sequence[str], field: str, left: Callable[[], bool] = never
    ) -> tuple[list[int], list[list[int]], int]:
        """(the prompt alone, every option tokenized together with it, where their own parts begin).

        That place is the longest common token prefix of all of them. Where nothing is common (the options
        merge with a prompt of one token), prompt and options are tokenized apart, and it is the prompt's end.

        Raises InvalidRequestError, and Abandoned as soon as ``left()``.
        """
        segments = self.segments(prompt, field)
        for i, option in enumerate(options):
            if not isinstance(option, str):
                raise InvalidRequestError(f"options[{i}]", f"must be text, not {kind_of(option)}")
            check_text(option, f"options[{i}]")
        check_options(_text_bytes(segments), options)
        alone = self.encode(segments)
        sequences = self._encode_each([with_option(segments, option) for option in options], left)
        start = common_prefix([alone, *sequences])
        if start == 0:
            apart: list[list[str | list[int]]] = [[alone, option] for option in options]
            start, sequences = len(alone), self._encode_each(apart, left)
        return alone, sequences, start

    def _encode_each(
        self, prompts: Sequence[list[str | list[int]]], left: Callable[[], bool]
    ) -> list[list[int]]:
        encoded = []
        for segments in prompts:
            if left():
                raise Abandoned
            encoded.append(self.encode(segments))
        return encoded

    def _check_length(self, field: str, parts: Sequence[Any]) -> None:
        """Refuse what is too long by far, before anything is done with each of its parts."""
        characters = sum(len(part) for part in parts if isinstance(part, str))
        tokens = sum(len(part) for part in parts if not isinstance(part, str) and isinstance(part, Sequence))
        if characters > self._max_bytes:
            raise InvalidRequestError(
                field,
                f"{characters} characters are more than {self._max_tokens} tokens, {self._limit}, can spell",
            )
        if tokens > self._max_tokens:
            raise InvalidRequestError(
                field,
                f"has {tokens} tokens; {self._limit} is {self._max_tokens}, "
                f"so a prompt may have at most {self._longest}",
            )

    def _checked(self, part: Segment | Any, field: str) -> str | list[int]:
        if isinstance(part, str):
            return check_text(part, field)
        if not isinstance(part, Sequence):
            raise InvalidRequestError(field, f"must be text or a list of token ids, not {kind_of(part)}")
        size = self._tokenizer.vocab_size
        ids: Sequence[Any] = part
        if ids and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < size:
            return list(ids)
        for i, token in enumerate(ids):
            if not _is_integer(token) or not 0 <= token < size:
                reason = f"must be a token id from 0 to {size - 1}, not {brief(token)}"
                raise InvalidRequestError(f"{field}[{i}]", reason)
        return list(part)


def is_long(prompts: Iterable[Prompt]) -> bool:
    """Whether encoding these would take noticeable time."""
    total = 0
    for prompt in prompts:
        total += _rough_size(prompt)
        if total > LONG_TEXT:
            return True
    return False


def _rough_size(prompt: Any) -> int:
    """Characters and ids; of a long list only as many as there are parts."""
    if not isinstance(prompt, (str, list, tuple)):
        return 0
    if isinstance(prompt, str) or len(prompt) > LONG_TEXT:
        return len(prompt)
    return len(prompt) + sum(len(part) for part in prompt if isinstance(part, (str, list, tuple)))


def _merged(parts: Sequence[str | list[int]]) -> list[str | list[int]]:
    """Adjacent texts as one, nothing empty."""
    merged: list[str | list[int]] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif part:
            merged += filter(None, ["".join(texts)])
            texts = []
            merged.append(part)
    merged += filter(None, ["".join(texts)])
    return merged


def _text_bytes(segments: Sequence[str | list[int]]) -> int:
    return sum(len(part.encode()) for part in segments if isinstance(part, str))


def with_option(segments: Sequence[str | list[int]], option: str) -> list[str | list[int]]:
    """The prompt and an option after it, to be tokenized together."""
    if not option:
        return list(segments)
    if segments and isinstance(segments[-1], str):
        return [*segments[:-1], segments[-1] + option]
    return [*segments, option]


def common_prefix(sequences: Sequence[list[int]]) -> int:
    """Length of the longest prefix that all sequences share."""
    shortest, longest = min(sequences), max(sequences)  # in lexicographic order the extremes differ first
    length = min(len(shortest), len(longest))
    return next((i for i in range(length) if shortest[i] != longest[i]), length)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
