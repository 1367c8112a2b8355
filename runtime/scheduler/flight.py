"""Steps that run while the next one is planned (``SchedulerConfig.overlap``).

A step that was planned is launched: another thread computes it, one step after the other, and the scheduler plans the
step after it at the same time. So the results of step k are entered while step k + 1 runs, and the device does not
wait for Python.

A runner whose device goes on while Python does (``LaunchingRunner``) needs no thread: a step is launched on the device right
after the one before it, which is still being computed there, and reads on the device what that one samples.

**What is planned before it is known.** The tokens that step k samples are not there when step k + 1 is planned. A
request whose next token can depend on nothing but its logits extends by one token all the same, which is put in when
step k has sampled it; if step k turns out to have ended the request, what step k + 1 computed for it is dropped. While
a step has any other request (one with a constraint, penalties, logprobs, or tokens that may not come yet), its results
are entered before the next step is planned, as without overlap.

**Why slots may be given up while a step that reads or writes them runs.** Steps are computed one after the other, and
slots are given out by plans in the same order: who gets a slot writes it after all that was launched before.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import Protocol

from trellis.fsm.contract import Vocabulary
from trellis.runtime.executor.contract import Extend, Runner, launches
from trellis.runtime.scheduler.compute import Begun, begin, compute
from trellis.runtime.scheduler.plan import PlannedExtend, StepPlan
from trellis.runtime.scheduler.request import Request


class StepAbandoned(Exception):
    """The step was not computed, as the one before it failed."""


class Flight:
    """A step that was launched. ``wait`` until its results are in its plan; that raises what the runner raised, and
    StepAbandoned if the step before failed."""

    def __init__(
        self,
        plan: StepPlan,
        before: Flight | None,
        runner: Runner,
        vocabulary: Vocabulary,
        device: Executor,
        aside: Executor,
    ) -> None:
        self.plan = plan
        extends = [extend.to_extend() for extend in plan.extends]  # now, as the requests go on to change
        earlier = None if before is None else before._work
        self._work: _Work
        if launches(runner):
            self._work = _OnDevice(earlier, plan, extends, runner, vocabulary, aside)
        else:
            self._work = _InThread(earlier, plan, extends, runner, vocabulary, aside, device)

    def wait(self) -> None:
        self._work.wait()

    def lets_plan_ahead(self) -> bool:
        """May the next step be planned before the results are entered?"""
        return all(_is_free(extend.request) for extend in self.plan.extends)

    def take_off(self) -> None:
        """Note in the requests what will have been computed, as the next plan goes on from there."""
        for extend in self.plan.extends:
            extend.request.computed = extend.end
            extend.request.in_flight = extend


class _Work(Protocol):
    @property
    def failed(self) -> bool:
        """Whether it is known to have failed."""

    def wait(self) -> None: ...


class _InThread:
    """A step that another thread computes, after the one before it."""

    def __init__(
        self,
        before: _Work | None,
        plan: StepPlan,
        extends: list[Extend],
        runner: Runner,
        vocabulary: Vocabulary,
        aside: Executor,
        device: Executor,
    ) -> None:
        def run() -> None:
            if before is not None and before.failed:
                raise StepAbandoned
            for planned, extend in zip(plan.extends, extends, strict=True):
                if planned.follows is not None:
                    extend.token_ids[0] = _token(planned.follows, vocabulary)
                    planned.follows = None  # else every step would hold all those before it
            compute(plan, extends, runner, vocabulary, aside)

        self._done: Future[None] = device.submit(run)

    @property
    def failed(self) -> bool:
        return self._done.exception() is not None

    def wait(self) -> None:
        self._done.result()


class _OnDevice:
    """A step that was launched on the device from here. A failure to launch it is raised by ``wait``, too."""

    def __init__(
        self,
        before: _Work | None,
        plan: StepPlan,
        extends: list[Extend],
        runner: Runner,
        vocabulary: Vocabulary,
        aside: Executor,
    ) -> None:
        self._begun: Begun | None = None
        self._error: Exception | None = None
        try:
            if before is not None and before.failed:
                raise StepAbandoned
            places = before.places() if isinstance(before, _OnDevice) else {}
            for planned, extend in zip(plan.extends, extends, strict=True):
                if planned.follows is not None:
                    extend.follows = places[id(planned.follows)]
                    planned.follows = None
            self._begun = begin(plan, extends, runner, vocabulary, aside)
        except Exception as error:
            self._error = error

    @property
    def failed(self) -> bool:
        return self._error is not None

    def places(self) -> dict[int, int]:
        return {} if self._begun is None else self._begun.places()

    def wait(self) -> None:
        try:
            if self._begun is not None:
                self._begun.finish()
        except Exception as error:
            self._error = error
        if self._error is not None:
            raise self._error


def _is_free(request: Request) -> bool:
    """Can its next token depend on nothing but its logits?"""
    return not (
        request.matcher is not None
        or request.healing is not None
        or request.scores
        or request.penalised
        or request.params.min_new_tokens
    )


def _token(extend: PlannedExtend, vocabulary: Vocabulary) -> int:
    """What the extend sampled. Where that is nothing possible the request will fail, and any token will do."""
    token = extend.drawn[0][0] if extend.drawn else 0
    return token if 0 <= token < vocabulary.size else 0
