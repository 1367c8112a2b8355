"""Plays a trace on the scheduler: issues each call when those that it waits for have ended, and notes what happens."""

from __future__ import annotations

import heapq
import random
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from benchmark.scheduling.model import EOS, Clock, StepTime, TraceRunner, vocabulary
from benchmark.scheduling.trace import Call, Trace
from trellis.fsm.contract import ConstraintSpec, Grammar
from trellis.runtime.messages import Counts, GenerateCommand, SamplingParams, TokenOutput
from trellis.runtime.scheduler import Scheduler, SchedulerConfig


@dataclass
class Played:
    """What one run gave. Times are virtual seconds, by call; ``order`` is what happened to calls, in order.

    order: ("start", call) when it was first admitted, ("end", call) when it finished. counts: of each call.
    step_seconds: CPU seconds of scheduler in each step, without the runner; running: requests in each step.
    """

    first_token: list[float]
    finished: list[str]
    counts: list[Counts]
    order: list[tuple[str, int]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    retractions: int = 0
    computed_tokens: int = 0
    duration: float = 0.0

    @property
    def hit_tokens(self) -> int:
        return sum(counts.cached_tokens for counts in self.counts)


class NoGrammars:
    """The compiler of a scheduler that gets no constraints."""

    def submit(self, spec: ConstraintSpec) -> Future[Grammar]:
        raise RuntimeError(f"no call of a trace has a constraint, this one has: {spec}")

    def stats(self) -> dict[str, object]:
        return {}


class Simulation:
    """One run of a trace. config: of the scheduler; its pool must hold the longest call."""

    def __init__(self, trace: Trace, config: SchedulerConfig, step_time: StepTime) -> None:
        self._trace = trace
        self._clock = Clock()
        outputs = [_said(call) for call in trace.calls]
        self._runner = TraceRunner(outputs, step_time, self._clock)
        self.scheduler = Scheduler(
            config, self._runner, vocabulary(), NoGrammars(), clock=self._clock, rng=random.Random(0)
        )
        n = len(trace.calls)
        self._result = Played([-1.0] * n, [""] * n, [Counts()] * n)
        self._issued = [0.0] * n
        self._blockers = [len(call.after) for call in trace.calls]
        self._followers: list[list[int]] = [[] for _ in range(n)]
        for index, call in enumerate(trace.calls):
            for earlier in call.after:
                self._followers[earlier].append(index)
        self._due = [(call.delay, index) for index, call in enumerate(trace.calls) if not call.after]
        heapq.heapify(self._due)
        self._started: set[int] = set()

    def play(self) -> Played:
        """Until every call has ended."""
        scheduler, clock, result = self.scheduler, self._clock, self._result
        while self._due or scheduler.has_work():
            if not scheduler.has_work():
                clock.now = max(clock.now, self._due[0][0])
            self._issue()
            busy = self._runner.busy
            began = time.thread_time()
            outputs = scheduler.step()
            spent = time.thread_time() - began - (self._runner.busy - busy)
            result.step_seconds.append(spent)
            self._note(outputs)
        result.retractions = scheduler.counters.retractions
        result.computed_tokens = self._runner.computed_tokens
        result.duration = clock.now
        return result

    def _issue(self) -> None:
        commands = []
        while self._due and self._due[0][0] <= self._clock.now:
            at, index = heapq.heappop(self._due)
            self._issued[index] = at
            commands.append(_command(self._trace.calls[index], index))
        self.scheduler.add(commands)

    def _note(self, outputs: list[TokenOutput]) -> None:
        result = self._result
        ended = [int(output.rid) for output in outputs if output.finish is not None]
        running = [int(request.rid) for request in self.scheduler.roster.running]
        result.running.append(len(running) + len(ended))
        for index in (*running, *ended):
            if index not in self._started:
                self._started.add(index)
                result.order.append(("start", index))
        for output in outputs:
            index = int(output.rid)
            if result.first_token[index] < 0:
                result.first_token[index] = self._clock.now - self._issued[index]
            if output.finish is not None:
                self._end(index, output)

    def _end(self, index: int, output: TokenOutput) -> None:
        assert output.finish is not None
        if output.finish.type not in ("stop", "length"):
            raise RuntimeError(f"call {index} of {self._trace.name} ended with {output.finish}")
        self._result.order.append(("end", index))
        self._result.finished[index] = output.finish.type
        self._result.counts[index] = output.counts
        for follower in self._followers[index]:
            self._blockers[follower] -= 1
            if not self._blockers[follower]:
                at = self._clock.now + self._trace.calls[follower].delay
                heapq.heappush(self._due, (at, follower))


def _said(call: Call) -> list[int]:
    """What the runner samples for a call: its output, and an end where it stops by itself."""
    output: list[int] = call.output.tolist()
    return output if len(output) >= call.max_new_tokens else [*output, EOS]


def _command(call: Call, index: int) -> GenerateCommand:
    return GenerateCommand(
        rid=str(index),
        token_ids=call.prompt.tolist(),
        params=SamplingParams(max_new_tokens=call.max_new_tokens, temperature=0.0, seed=index),
        logprob_start=call.score_from,
    )
