"""A variable of a state, from the moment its expression is appended until it has its value."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from trellis.errors import InvalidRequestError
from trellis.frontend.backends.base import Completion, Counts, ScoreResult
from trellis.frontend.choices import Decision
from trellis.frontend.failure import Failure
from trellis.frontend.feed import Feed
from trellis.frontend.parameters import RunOptions
from trellis.frontend.spans import Span


@dataclass(frozen=True)
class Meta:
    """How a gen came about.

    counts: where its tokens came from (cached / sampled / forced). seconds: from the request to its end.
    finish_reason: ``stop`` | ``length``; matched: the stop string, stop_regex or token id that ended it, if one did.
    token_ids: all output tokens; logprobs and top_logprobs have one entry for each, when asked for.
    pieces: the text, cut where its origin changes: (text, origin) with origin ``sampled`` (the model chose),
        ``forced`` (the constraint left no choice) or, the whole of a select's text, ``selected``.
    saved_prompt_tokens: of text that an earlier call to an API had already written, the prompt tokens that were not
        sent again (API speculative execution); None otherwise.
    grammar_engine: what enforced the constraint, if there was one. validated_only: parts of it that were only
        validated in the finished text (``strict=False``). constraint_warnings: what should be known about it.
    truncated_tokens: how many tokens the prompt lost at its beginning because it was too long.
    """

    counts: Counts = field(default_factory=Counts)
    seconds: float = 0.0
    finish_reason: str | None = None
    matched: str | int | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    pieces: tuple[tuple[str, str], ...] = ()
    grammar_engine: str | None = None
    validated_only: tuple[str, ...] = ()
    constraint_warnings: tuple[str, ...] = ()
    saved_prompt_tokens: int | None = None
    truncated_tokens: int = 0

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
            pieces=_pieces(completion.text, completion.forced_spans),
            grammar_engine=completion.grammar_engine,
            validated_only=completion.validated_only,
            constraint_warnings=completion.constraint_warnings,
            saved_prompt_tokens=completion.saved_prompt_tokens,
            truncated_tokens=completion.truncated_tokens,
        )


def _pieces(text: str, forced: tuple[tuple[int, int], ...]) -> tuple[tuple[str, str], ...]:
    cuts = [0, *(at for span in forced for at in span), len(text)]
    parts = (text[start:end] for start, end in pairwise(cuts))
    return tuple((part, ("sampled", "forced")[i % 2]) for i, part in enumerate(parts) if part)


@dataclass(frozen=True)
class SelectMeta(Meta):
    """How a select decided. All tuples are in the order of ``choices``.

    scores: by ``method``. probabilities: softmax of scores / temperature; they add up to 1.
    option_token_ids, option_logprobs: each option's own tokens after the boundary common to all, and the
        model's log-probability of each. option_unconditional_logprobs: the same without the prompt, for the method
        that compares with it.
    """

    choices: tuple[str, ...] = ()
    method: str = ""
    scores: tuple[float, ...] = ()
    probabilities: tuple[float, ...] = ()
    option_token_ids: tuple[tuple[int, ...], ...] = ()
    option_logprobs: tuple[tuple[float, ...], ...] = ()
    option_unconditional_logprobs: tuple[tuple[float, ...], ...] | None = None

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
            pieces=((choices[decision.index], "selected"),),
            choices=choices,
            method=method,
            scores=decision.scores,
            probabilities=decision.probabilities,
            option_token_ids=tuple(option.token_ids for option in result.options),
            option_logprobs=tuple(option.logprobs for option in result.options),
            option_unconditional_logprobs=_alone(result),
        )


def _alone(result: ScoreResult) -> tuple[tuple[float, ...], ...] | None:
    rows = tuple(option.unconditional for option in result.options if option.unconditional is not None)
    return rows if len(rows) == len(result.options) else None


@dataclass(eq=False)
class Variable:
    """kind: ``gen`` | ``select`` | ``set`` | ``join`` | ``scope``.

    A joined variable holds a list in each of value, text and meta, one entry a branch. problem: why there is no
    value, though there is a text: the text is not what its schema wants, because it was cut. feed: its text as it comes;
    of a gen with several samples, of the first, and more_feeds are those of the others. options: of a gen of a program
    that runs on another's state. is_open: a scope whose end has not been appended yet. span: when all this happened, of a
    gen or select.
    """

    name: str | None
    kind: str
    value: Any = None
    text: Any = ""
    meta: Any = None
    problem: Failure | None = None
    done: bool = False
    feed: Feed = field(default_factory=Feed)
    more_feeds: tuple[Feed, ...] = ()
    options: RunOptions | None = None
    is_open: bool = False
    span: Span | None = None

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """One a sample."""
        return (self.feed, *self.more_feeds)

    def wake(self) -> None:
        """Let everyone who waits for it look again."""
        for feed in self.feeds:
            feed.wake()

    def resolve(self, value: Any, text: Any, meta: Any, problem: Failure | None = None) -> None:
        self.value, self.text, self.meta, self.problem = value, text, meta, problem
        if self.span is not None:
            self.span.finish(text, meta)
        self.done = True
        self.wake()


def feed_of(variable: Variable, sample: int) -> Feed:
    """The text of one sample as it comes. InvalidRequestError if the variable has no such sample."""
    feeds = variable.feeds
    if isinstance(sample, bool) or not isinstance(sample, int) or not 0 <= sample < len(feeds):
        has = f"samples 0 to {len(feeds) - 1}" if len(feeds) > 1 else "one sample, 0"
        raise InvalidRequestError("sample", f"variable {variable.name!r} has {has}; got {sample!r}")
    return feeds[sample]
