"""What one step computes: plain data between the planner, the model and the commit."""

from __future__ import annotations

from dataclasses import dataclass, field

from trellis.runtime.executor.contract import Extend
from trellis.runtime.scheduler.memory import Published
from trellis.runtime.scheduler.request import Request


@dataclass(slots=True)
class PlannedExtend:
    """Tokens [start, end) of one request.

    scored: tokens [first, last) whose logprobs this computation gives. sample: the logits of the last token
    give a new one. logits_from: index of the first token of the extend whose logits are read (see ``Extend``).
    first_row: where this extend's rows begin in the logits of the batch.
    """

    request: Request
    start: int
    end: int
    scored: tuple[int, int]
    sample: bool
    logits_from: int
    first_row: int

    @property
    def n_scored(self) -> int:
        return self.scored[1] - self.scored[0]

    @property
    def last_row(self) -> int:
        """The row of the extend's last token."""
        return self.first_row + self.end - self.start - self.logits_from - 1

    def to_extend(self) -> Extend:
        """As the runner wants it; the arrays are views, valid during this step."""
        request = self.request
        return Extend(
            request.tokens.view(self.start, self.end),
            self.start,
            request.slots.view(0, self.end),
            self.logits_from,
        )


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

    def add(self, request: Request, end: int) -> PlannedExtend:
        """The request computes its tokens from ``computed`` to ``end``; their slots are reserved."""
        start = request.computed
        sample = request.closing is None and end == len(request.tokens)
        scored = request.score_span(start, end)
        first_read = scored[0] - 1 if scored[1] > scored[0] else end - int(sample)
        first_row = self.extends[-1].last_row + 1 if self.extends else 0
        extend = PlannedExtend(request, start, end, scored, sample, first_read - start, first_row)
        self.extends.append(extend)
        return extend
