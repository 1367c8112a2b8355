"""Runs the batch of a step and turns its results into tokens: forward, score, mask, sample; then commit.

A failure of the runner is the failure of the whole batch and is raised. A failure of one request's matcher
is that request's own: it ends with ``error`` and the others go on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from trellis.errors import TrellisError
from trellis.fsm.contract import Vocabulary
from trellis.runtime.executor.contract import Logits, Runner, Sampled, SampleRow
from trellis.runtime.messages import FinishReason, TopLogprobs
from trellis.runtime.scheduler.advance import accept_sampled, forbidden_tokens
from trellis.runtime.scheduler.buffer import IntArray
from trellis.runtime.scheduler.counters import Counters
from trellis.runtime.scheduler.plan import PlannedExtend, StepPlan
from trellis.runtime.scheduler.request import Request

logger = logging.getLogger(__name__)

Score = tuple[float, TopLogprobs]


@dataclass
class StepResult:
    """What the model said, by request: the sampled token, scores of known tokens, and matchers that failed."""

    sampled: dict[Request, tuple[int, float | None, TopLogprobs | None]]
    scores: dict[Request, list[Score]]
    faults: dict[Request, Exception]


def compute(plan: StepPlan, runner: Runner, vocabulary: Vocabulary) -> StepResult:
    """Run the batch. Raises whatever the runner raises; no request has changed then."""
    logits = runner.forward([extend.to_extend() for extend in plan.extends])
    scores = _score(plan, runner, logits)
    to_sample = [extend for extend in plan.extends if extend.sample]
    masks, faults = _masks([extend.request for extend in to_sample], vocabulary)
    to_sample = [extend for extend in to_sample if extend.request not in faults]
    rows = [_sample_row(extend, masks.get(extend.request), vocabulary) for extend in to_sample]
    sampled = runner.sample(logits, rows) if rows else Sampled([], [], [])
    drawn = zip(sampled.token_ids, sampled.logprobs, sampled.top, strict=True)
    return StepResult(
        {extend.request: token for extend, token in zip(to_sample, drawn, strict=True)}, scores, faults
    )


def commit(plan: StepPlan, result: StepResult, vocabulary: Vocabulary, counters: Counters) -> None:
    """Enter the results into the requests: tokens, logprobs, matcher, reasons to finish."""
    for extend in plan.extends:
        request = extend.request
        _enter_computed(extend, counters)
        _enter_scores(request, result.scores.get(request, ()))
        sampled_before, forced_before = request.sampled_tokens, request.forced_tokens
        try:
            if request in result.faults:
                raise result.faults[request]
            if request in result.sampled:
                token, logprob, top = result.sampled[request]
                accept_sampled(request, token, logprob, top, vocabulary)
        except Exception as error:
            fail(request, error)
        counters.sampled_tokens += request.sampled_tokens - sampled_before
        counters.forced_tokens += request.forced_tokens - forced_before


def fail(request: Request, error: Exception) -> None:
    """The request ends here, with what it has."""
    if not isinstance(error, TrellisError):
        logger.error("request %s failed", request.rid, exc_info=error)
    message = str(error) if isinstance(error, TrellisError) else f"{type(error).__name__}: {error}"
    request.closing = FinishReason("error", message=message, status=500)


def _enter_computed(extend: PlannedExtend, counters: Counters) -> None:
    request = extend.request
    request.computed = extend.end
    request.forward_passes += 1
    if extend.start >= request.reached and request.accounted == request.prompt_len:
        request.reached = extend.end
        return
    counters.cached_tokens += request.account(extend.start, cached=True)
    computed = request.account(extend.end, cached=False)
    counters.computed_prompt_tokens += computed
    again = max(0, min(extend.end, request.reached) - extend.start)
    counters.recomputed_tokens += again
    request.reached = max(request.reached, extend.end)


def _enter_scores(request: Request, scores: list[Score] | tuple[()]) -> None:
    for logprob, top in scores:
        if request.scored_len < request.prompt_len:
            if request.input_logprobs is not None:
                request.input_logprobs.append(logprob)
        else:
            request.logprobs.append(logprob)
            request.top_logprobs.append(top[: request.top_logprobs_num])
        request.scored_len += 1


def _score(plan: StepPlan, runner: Runner, logits: Logits) -> dict[Request, list[Score]]:
    """Logprobs of tokens that were known before the step: prompt tokens and forced ones."""
    rows: list[int] = []
    tokens: list[int] = []
    scoring = [extend for extend in plan.extends if extend.n_scored]
    if not scoring:
        return {}
    for extend in scoring:
        first, last = extend.scored
        rows.extend(range(extend.first_row, extend.first_row + last - first))
        tokens.extend(extend.request.tokens.view(first, last).tolist())
    width = max(extend.request.top_logprobs_num for extend in scoring)
    logprobs, top = runner.score(logits, rows, tokens, width)
    scores = iter(zip(logprobs, top if width else [[]] * len(rows), strict=True))
    return {extend.request: [next(scores) for _ in range(extend.n_scored)] for extend in scoring}


def _masks(
    requests: list[Request], vocabulary: Vocabulary
) -> tuple[dict[Request, IntArray], dict[Request, Exception]]:
    """The token masks of the constrained requests (none where everything is allowed), and what failed."""
    constrained = [request for request in requests if request.matcher is not None]
    rows = np.zeros((len(constrained), vocabulary.mask_words), np.int32)
    masks: dict[Request, IntArray] = {}
    faults: dict[Request, Exception] = {}
    for request, row in zip(constrained, rows, strict=True):
        try:
            if request.matcher is not None and request.matcher.fill_mask(row):
                if not row.any():
                    raise TrellisError(f"the constraint allows no token at output token {request.n_output}")
                masks[request] = row
        except Exception as error:
            faults[request] = error
    return masks, faults


def _sample_row(extend: PlannedExtend, mask: IntArray | None, vocabulary: Vocabulary) -> SampleRow:
    request = extend.request
    params = request.params
    penalised = (
        params.frequency_penalty != 0.0 or params.presence_penalty != 0.0 or params.repetition_penalty != 1.0
    )
    return SampleRow(
        row=extend.last_row,
        params=params,
        seed=request.seed,
        step=request.n_output,
        mask=mask,
        forbidden=forbidden_tokens(request, vocabulary),
        history=request.tokens.view(0, None if penalised else 0),
        output_start=request.prompt_len if penalised else 0,
        want_logprob=request.return_logprob,
        top_logprobs_num=request.top_logprobs_num,
    )
