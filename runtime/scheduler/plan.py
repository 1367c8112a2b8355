"""What one step computes, and what came of it: plain data between the planner, the model and the commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trellis.runtime.executor.contract import Extend
from trellis.runtime.messages import TopLogprobs
from trellis.runtime.scheduler.buffer import IntArray
from trellis.runtime.scheduler.memory import Published
from trellis.runtime.scheduler.request import Request

Score = tuple[float, TopLogprobs]
Drawn = tuple[int, float | None, TopLogprobs | None]  # a token, its logprob and the best alternatives

NOTHING: tuple[()] = ()
UNSCORED = (0, 0)


@dataclass(slots=True)
class PlannedExtend:
    """Tokens [start, end) of one request, and a draft of what may follow them.

    scored: tokens [first, last) whose logprobs this computation gives. sample: the logits of the last token
    give a new one. logits_from: index of the first token of the extend whose logits are read (see ``Extend``).
    first_row: where this extend's rows begin in the logits of the batch. draft: tokens after ``end`` that are
    computed too, in case they are what is sampled; each gives the token after it. step: output tokens before the
    one that is sampled. follows: an extend that is being computed; what it samples is the one token of this extend.

    Filled by the step: masks, one for each position that is sampled (None allows everything; empty if the request
    has no constraint); scores of the tokens [first, last); drawn, the tokens for the positions from ``end`` on,
    each as if the draft before it had come; fault, why this request fails.
    """

    request: Request
    start: int
    end: int
    scored: tuple[int, int]
    sample: bool
    logits_from: int
    first_row: int
    step: int = 0
    draft: Sequence[int] = NOTHING
    follows: PlannedExtend | None = None
    masks: Sequence[IntArray | None] = NOTHING
    scores: Sequence[Score] = NOTHING
    drawn: Sequence[Drawn] = NOTHING
    fault: Exception | None = None

    @property
    def n_scored(self) -> int:
        return self.scored[1] - self.scored[0]

    @property
    def sample_row(self) -> int:
        """The row of the last token that is known. The rows of the draft follow."""
        return self.first_row + self.end - self.start - self.logits_from - 1

    def to_extend(self) -> Extend:
        """As the runner wants it; the arrays are views, valid during this step."""
        request, start, end = self.request, self.start, self.end
        tokens = request.tokens.view(start, end) if self.follows is None else np.zeros(1, np.int32)
        if self.draft:
            tokens = np.concatenate([tokens, np.array(self.draft, np.int32)])
        return Extend(tokens, start, request.slots.view(0, end + len(self.draft)), self.logits_from)


@dataclass
class StepPlan:
    """extends: the batch, in the order in which slots were given. published: what a failure takes back.

    retracted: requests that went back to the queue. unfit: requests that can not go on, as the pool is full
    and nothing else can give way; they end with what they have.
    """

    extends: list[PlannedExtend] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)
    retracted: list[Request] = field(default_factory=list)
    unfit: list[Request] = field(default_factory=list)
    _rows: int = 0

    def add(self, request: Request, end: int, draft: Sequence[int] = NOTHING) -> PlannedExtend:
        """The request computes its tokens from ``computed`` to ``end`` and the draft; their slots are reserved."""
        start, known = request.computed, len(request.tokens)
        flying = request.in_flight
        follows = flying if flying is not None and flying.sample else None
        if follows is not None:
            known += 1
        sample = request.closing is None and end == known
        scored = request.score_span(start, end) if request.scores else UNSCORED
        logits_from = (scored[0] - 1 if scored[1] > scored[0] else end - sample) - start
        step = known - request.prompt_len
        extend = PlannedExtend(
            request, start, end, scored, sample, logits_from, self._rows, step, draft, follows
        )
        self._rows += end - start - logits_from + len(draft)
        self.extends.append(extend)
        return extend
