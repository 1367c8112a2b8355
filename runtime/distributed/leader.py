"""Rank 0's side of a step.

**Only rank 0 has a scheduler.** The alternative is one a rank, all fed with the same requests. They would have to take the
same decisions from then on, and decisions depend on clocks (policies age), on when a grammar has been compiled on a thread, on
when an abort arrives; one that came out differently would mix up the K/V of requests without a sign. Here the other ranks are
told the extends of each step and have nothing to decide: they keep K/V in the slots that they are told, and compute. Sampling,
constraints and the tree are on rank 0, whose logits are whole. It costs one small message a rank and step (``wire.py``).

The messages go over zmq, as all that is no tensor; ``torch.distributed`` has the sums. So a rank may wait for work for hours
without a collective that would time out, and each wait within a step has a bound.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from trellis.runtime.distributed.contract import GroupBroken
from trellis.runtime.distributed.group import Group
from trellis.runtime.distributed.wire import End, Meet, Message, Rows, StepEncoder
from trellis.runtime.executor.contract import Extend
from trellis.runtime.executor.step import LogitsRows, Step
from trellis.runtime.manager.transport import Sender

MEET_EVERY = 5.0  # seconds between signs of life while there is nothing to compute


class LeadingStep:
    """A step of which the other ranks compute their part at the same time.

    step: rank 0's own part. outboxes: one to each other rank. followed: where on the device tokens stand that the next step
    follows (see ``StepRunner.followed``); the others get them there. Any failure after the others were told is GroupBroken: they may
    be waiting in the middle of the step, or not have got there.
    """

    def __init__(
        self,
        step: Step,
        group: Group,
        outboxes: Sequence[Sender[Message]],
        followed: Tensor | None = None,
    ) -> None:
        self.name = step.name
        self._step = step
        self._group = group
        self._outboxes = outboxes
        self._followed = followed
        self._encoder = StepEncoder()
        self._steps = 0
        self._last_sign = time.monotonic()

    def forward(self, extends: Sequence[Extend]) -> LogitsRows:
        message = self._encoder.encode(extends)
        self._steps += 1
        with self._together("a step"):
            self._tell(message)
            self._group.share_followed(self._followed, extends)
            rows = self._step.forward(extends)
        rows.around_late_rows = self._late_rows
        return rows

    def stats(self) -> dict[str, Any]:
        """Of its own part, where that counts anything."""
        counted: Callable[[], dict[str, Any]] = getattr(self._step, "stats", dict)
        return counted()

    def stay_in_touch(self) -> None:
        """Called from time to time while there is nothing to compute: raises GroupBroken if a rank is gone or stuck."""
        if time.monotonic() - self._last_sign >= MEET_EVERY:
            with self._together("a sign of life"):
                self._tell(Meet())
                self._group.meet()

    def end(self) -> None:
        """Let the others leave the group."""
        self._tell(End())

    @contextlib.contextmanager
    def _late_rows(self, rows: Sequence[int]) -> Iterator[None]:
        with self._together("logits"):
            self._tell(Rows(self._steps, list(rows)))
            yield

    def _tell(self, message: Message) -> None:
        for outbox in self._outboxes:
            outbox.send([message])
        self._last_sign = time.monotonic()

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise GroupBroken(f"{what} failed: {type(error).__name__}: {error}") from error
