"""Runs the batch of a step: forward, and meanwhile the masks; then score and sample.

A failure of the runner is the failure of the whole batch and is raised. A failure of one request's matcher
is that request's own: it is noted as the ``fault`` of its extend, and the others go on.

A step is begun, and finished when its tokens are there. For most runners that is one; a ``LaunchingRunner`` goes on by itself
in between (see ``flight.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from trellis.fsm.contract import Vocabulary
from trellis.runtime.executor.contract import (
    Extend,
    Logits,
    Pending,
    Runner,
    Sampled,
    SampleRow,
    launches,
)
from trellis.runtime.scheduler.advance import forbidden_tokens
from trellis.runtime.scheduler.buffer import IntArray
from trellis.runtime.scheduler.masks import MaskFilling
from trellis.runtime.scheduler.plan import PlannedExtend, StepPlan
from trellis.runtime.scheduler.request import Request


class Begun:
    """A step whose tokens are being sampled."""

    def __init__(self, extends: Sequence[PlannedExtend], pending: Pending, runner: Runner) -> None:
        self._extends = extends
        self._pending = pending
        self._runner = runner

    def places(self) -> dict[int, int]:
        """Where the runner keeps the tokens: ``id`` of an extend that samples one → its place, if the runner keeps any."""
        firsts = accumulate((max(1, len(extend.masks)) for extend in self._extends), initial=0)
        places = self._pending.places
        return {id(extend): places[at] for extend, at in zip(self._extends, firsts, strict=False) if places}

    def finish(self) -> None:
        """Wait for the tokens and put them into the extends."""
        with _recovery(self._runner):
            sampled = self._pending.result()
        drawn = iter(zip(sampled.token_ids, sampled.logprobs, sampled.top, strict=True))
        for extend in self._extends:
            extend.drawn = [next(drawn) for _ in extend.masks] if len(extend.masks) > 1 else (next(drawn),)


@dataclass(frozen=True)
class _Sampled:
    """Pending, of a runner that waits."""

    sampled: Sampled
    places: Sequence[int] = ()

    def result(self) -> Sampled:
        return self.sampled


def compute(
    plan: StepPlan, extends: Sequence[Extend], runner: Runner, vocabulary: Vocabulary, aside: Executor
) -> None:
    """Fill in what came of each extend of the plan; extends: the same, as the runner wants them. Raises whatever the
    runner raises; no request has changed then."""
    begin(plan, extends, runner, vocabulary, aside).finish()


def begin(
    plan: StepPlan, extends: Sequence[Extend], runner: Runner, vocabulary: Vocabulary, aside: Executor
) -> Begun:
    """As ``compute``, but the tokens that are sampled are not waited for if the runner can do without."""
    with _recovery(runner):
        filling = MaskFilling(plan.extends, vocabulary, aside)
        try:
            logits = runner.forward(extends)
        finally:
            filling.wait()
        _score(plan, runner, logits)
        return _sample(plan, runner, logits, vocabulary)


@contextmanager
def _recovery(runner: Runner) -> Iterator[None]:
    """A runner with a device is told of a failure; its error goes on."""
    try:
        yield
    except Exception as error:
        if launches(runner):
            runner.recover(error)
        raise


def _score(plan: StepPlan, runner: Runner, logits: Logits) -> None:
    """Logprobs of tokens that were known before the step: prompt tokens and forced ones."""
    scoring = [extend for extend in plan.extends if extend.scored[1] > extend.scored[0]]
    if not scoring:
        return
    rows: list[int] = []
    tokens: list[int] = []
    for extend in scoring:
        first, last = extend.scored
        rows.extend(range(extend.first_row, extend.first_row + last - first))
        tokens.extend(extend.request.tokens.view(first, last).tolist())
    width = max(extend.request.top_logprobs_num for extend in scoring)
    logprobs, top = runner.score(logits, rows, tokens, width)
    scores = iter(zip(logprobs, top if width else [[]] * len(rows), strict=True))
    for extend in scoring:
        extend.scores = [next(scores) for _ in range(extend.n_scored)]


def _sample(plan: StepPlan, runner: Runner, logits: Logits, vocabulary: Vocabulary) -> Begun:
    sampling = [extend for extend in plan.extends if extend.sample and extend.fault is None]
    rows: list[SampleRow] = []
    for extend in sampling:
        rows.append(_row(extend, vocabulary))
        if extend.draft:
            rows += _draft_rows(extend)
    if not rows:
        return Begun((), _Sampled(Sampled([], [], [])), runner)
    if launches(runner):
        return Begun(sampling, runner.sample_later(logits, rows), runner)
    return Begun(sampling, _Sampled(runner.sample(logits, rows)), runner)


def _row(extend: PlannedExtend, vocabulary: Vocabulary) -> SampleRow:
    """The row of the last known token. It is one object a request, brought up to date in every step."""
    request = extend.request
    row = request.sample_row
    if row is None:
        row = request.sample_row = _new_row(request)
    row.row = extend.first_row + extend.end - extend.start - extend.logits_from - 1
    row.step = extend.step
    if request.matcher is not None or row.mask is not None:
        row.mask = extend.masks[0] if extend.masks else None
    if request.params.min_new_tokens or row.forbidden:
        row.forbidden = forbidden_tokens(request, vocabulary)
    if request.penalised:
        row.history = request.tokens.view()
        row.output_start = request.prompt_len
    return row


def _draft_rows(extend: PlannedExtend) -> Iterator[SampleRow]:
    """A row for each token of the draft whose mask is there: as in a later step, if the draft comes."""
    request, first = extend.request, extend.sample_row
    again = len(request.healing.taken) if request.healing is not None else 0  # these are no output
    for index, mask in enumerate(extend.masks[1:], 1):
        row = _new_row(request)
        row.row = first + index
        row.step = request.n_output + max(0, index - again)
        row.mask = mask
        if request.penalised:
            row.history = _with_draft(request, extend.draft[:index])
            row.output_start = request.prompt_len + min(index, again)
        yield row


def _new_row(request: Request) -> SampleRow:
    return SampleRow(
        row=0,
        params=request.params,
        seed=request.seed,
        step=0,
        want_logprob=request.return_logprob,
        top_logprobs_num=request.top_logprobs_num,
    )


def _with_draft(request: Request, draft: Sequence[int]) -> IntArray:
    return np.concatenate([request.tokens.view(), np.array(draft, np.int32)])
