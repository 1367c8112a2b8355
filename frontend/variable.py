"""A variable of a state, from the moment its expression is appended until it has its value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trellis.frontend.backends.base import Completion, Counts, ScoreResult
from trellis.frontend.choices import Decision
from trellis.frontend.feed import Feed


@dataclass(frozen=True)
class Meta:
    """How a gen came about.

    counts: where its tokens came from (cached / sampled / forced). seconds: from the request to its end.
    finish_reason: ``stop`` | ``length``; matched: the stop string or token id that ended it, if one did.
    token_ids: all output tokens; logprobs and top_logprobs have one entry for each, when asked for.
    """

    counts: Counts = field(default_factory=Counts)
    seconds: float = 0.0
    finish_reason: str | None = None
    matched: str | int | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None

    @staticmethod
    def of_gen(completion: Completion, seconds: float) -> Meta:
        return Meta(
            counts=completion.counts,
            seconds=seconds,
            finish_reason=completion.finish_reason,
            matched=completion.matched,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            top_logprobs=completion.top_logprobs,
        )


@dataclass(frozen=True)
class SelectMeta(Meta):
    """How a select decided. All tuples are in the order of ``choices``.

    scores: by ``method``. probabilities: softmax of scores / temperature; they add up to 1.
    option_token_ids, option_logprobs: each option's own tokens after the boundary common to all, and the
        model's log-probability of each.
    """

    choices: tuple[str, ...] = ()
    method: str = ""
    scores: tuple[float, ...] = ()
    probabilities: tuple[float, ...] = ()
    option_token_ids: tuple[tuple[int, ...], ...] = ()
    option_logprobs: tuple[tuple[float, ...], ...] = ()

    @staticmethod
    def of_select(
        choices: tuple[str, ...], method: str, result: ScoreResult, decision: Decision, seconds: float
    ) -> SelectMeta:
        return SelectMeta(
            counts=result.counts,
            seconds=seconds,
            finish_reason="stop",
            token_ids=result.options[decision.index].token_ids,
            logprobs=result.options[decision.index].logprobs,
            choices=choices,
            method=method,
            scores=decision.scores,
            probabilities=decision.probabilities,
            option_token_ids=tuple(option.token_ids for option in result.options),
            option_logprobs=tuple(option.logprobs for option in result.options),
        )


@dataclass(eq=False)
class Variable:
    """kind: ``gen`` | ``select`` | ``set`` | ``join``.

    A joined variable holds a list in each of value, text and meta, one entry a branch.
    """

    name: str | None
    kind: str
    value: Any = None
    text: Any = ""
    meta: Any = None
    done: bool = False
    feed: Feed = field(default_factory=Feed)

    def resolve(self, value: Any, text: Any, meta: Any) -> None:
        self.value, self.text, self.meta = value, text, meta
        self.done = True
        self.feed.wake()
