"""Prompts as callers write them → token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from trellis.errors import InvalidRequestError
from trellis.runtime.manager.fields import brief, check_text, kind_of
from trellis.runtime.manager.types import Prompt, Segment


class PromptTokenizer(Protocol):
    """What the manager needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def token_bytes(self) -> Sequence[bytes]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class PromptEncoder:
    """Checks and encodes prompts.

    max_tokens: longest prompt of use; a text that must be longer is refused before it is tokenized.
    """

    def __init__(self, tokenizer: PromptTokenizer, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._max_bytes = max_tokens * max(map(len, tokenizer.token_bytes), default=1)

    def segments(self, prompt: Prompt, field: str) -> list[str | list[int]]:
        """The prompt as segments, checked: adjacent texts merged, nothing empty.

        Raises InvalidRequestError naming ``field``.
        """
        if not isinstance(prompt, Sequence):
            raise InvalidRequestError(field, f"must be text, token ids or segments, not {kind_of(prompt)}")
        if isinstance(prompt, str) or all(_is_integer(part) for part in prompt):
            parts: list[tuple[str, Any]] = [(field, prompt)]
        else:
            parts = [(f"{field}[{i}]", part) for i, part in enumerate(prompt)]
        merged: list[str | list[int]] = []
        for place, part in parts:
            segment = self._checked(part, place)
            if isinstance(segment, str) and merged and isinstance(merged[-1], str):
                merged[-1] += segment
            elif segment:
                merged.append(segment)
        size = sum(len(part.encode()) for part in merged if isinstance(part, str))
        if size > self._max_bytes:
            raise InvalidRequestError(
                field, f"{size} bytes are more than {self._max_tokens} tokens, the context length, can spell"
            )
        return merged

    def encode(self, segments: Sequence[str | list[int]]) -> list[int]:
        """Each text is tokenized on its own, token ids are taken as they are; BOS only at the very start."""
        ids: list[int] = []
        for i, segment in enumerate(segments):
            if isinstance(segment, str):
                ids += self._tokenizer.encode(segment, add_special_tokens=i == 0)
            else:
                ids += segment
        return ids

    def joint(
        self, segments: Sequence[str | list[int]], options: Sequence[str]
    ) -> tuple[list[int], list[list[int]], int]:
        """(the prompt alone, every option tokenized together with it, where their own parts begin).

        That place is the longest common token prefix of all of them. Where nothing is common (the options
        merge with a prompt of one token), prompt and options are tokenized apart, and it is the prompt's end.
        """
        alone = self.encode(segments)
        sequences = [self.encode(with_option(segments, option)) for option in options]
        start = common_prefix([alone, *sequences])
        if start == 0:
            start, sequences = len(alone), [self.encode([alone, option]) for option in options]
        return alone, sequences, start

    def _checked(self, part: Segment | Any, field: str) -> str | list[int]:
        if isinstance(part, str):
            return check_text(part, field)
        if not isinstance(part, Sequence):
            raise InvalidRequestError(field, f"must be text or a list of token ids, not {kind_of(part)}")
        size = self._tokenizer.vocab_size
        for i, token in enumerate(part):
            if not _is_integer(token) or not 0 <= token < size:
                reason = f"must be a token id from 0 to {size - 1}, not {brief(token)}"
                raise InvalidRequestError(f"{field}[{i}]", reason)
        return list(part)


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
