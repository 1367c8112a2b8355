"""The arguments of ``gen`` that do not change the type of its value; for type checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, TypedDict

Several: TypeAlias = Literal[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
"""Values of n for which a type checker sees a list; of other numbers it knows nothing."""


class GenOptions(TypedDict, total=False):
    """See ``trellis.gen``."""

    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_regex: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    ignore_eos: bool | None
    json_spacing: str | None
    strict: bool | None
    logprobs: bool | int | None
    return_logprob: bool | None
    top_logprobs_num: int | None
    token_healing: bool | None
    timeout: float | None


class TextOptions(GenOptions, total=False):
    """Those of a gen whose value is its text."""

    regex: str | None
    choices: Sequence[str] | None
    grammar: str | None
