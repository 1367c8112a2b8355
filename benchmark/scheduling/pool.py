"""The same work in a pool hardly larger than the largest request and in an ample one: ``--pool``.

All requests are there at once and some are aborted, each when it has said a given number of tokens, so that the work is
the same in every pool. What a small pool costs has two parts. Tokens that are computed again can be avoided. Steps can
not: a request needs its slots for as many steps as it says tokens, and the pool only has so many. So no scheduler does
it in fewer steps than the slots times steps of all requests ÷ slots of the pool, and that bound stands beside.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmark.scheduling.model import EOS, Clock, StepTime, TraceRunner, vocabulary
from benchmark.scheduling.simulation import NoGrammars
from benchmark.scheduling.trace import Builder, Call
from trellis.runtime.messages import GenerateCommand, SamplingParams
from trellis.runtime.scheduler import Scheduler, SchedulerConfig

TIGHT = 1.05
"""Slots of the small pool ÷ tokens of the largest request."""
ABORTED = 0.1
"""Share of the requests that are aborted."""


@dataclass(frozen=True)
class Work:
    """calls: all there at time 0. shared: leading tokens of each prompt that others have too, so that they may cost no
    slots. said: output tokens of each; of one in ``aborted`` until it is aborted."""

    calls: list[Call]
    shared: int
    said: list[int]
    aborted: frozenset[int]

    @property
    def largest(self) -> int:
        """Tokens of the largest request, prompt and most output."""
        return max(len(call.prompt) + call.max_new_tokens for call in self.calls)

    @property
    def total(self) -> int:
        """Slots that hold all requests at one time."""
        return sum(len(call.prompt) + call.max_new_tokens for call in self.calls)

    def least_steps(self, pool: int) -> float:
        """No schedule has fewer steps. In the step that gives its k-th token a request holds its prompt and k - 1 tokens;
        a step has room for ``pool`` slots, and for one request that holds more than half of them."""
        held = np.concatenate(
            [
                len(call.prompt) - self.shared + np.arange(n)
                for call, n in zip(self.calls, self.said, strict=True)
            ]
        )
        return max(held.sum() / pool, int((2 * held > pool).sum()), max(self.said))


@dataclass(frozen=True)
class Done:
    """What it took: tokens computed, forward passes, virtual seconds, retractions."""

    computed: int
    steps: int
    seconds: float
    retractions: int


def equal(b: Builder, count: int) -> None:
    """All equally large: a pool of 1.05 holds one of them at a time."""
    for _ in range(count):
        b.add(Call(b.text(400, 400), b.text(100, 100), 100, b.program()))


def pareto(b: Builder, count: int) -> None:
    """Sizes of 32 to 2,000 tokens, most of them small; half of the requests say half of what they may."""
    for index in range(count):
        size = 2000 if index == count // 2 else min(2000, int(32 * (1 + b.rng.pareto(1.2))))
        n = max(1, int(size * b.rng.uniform(0.2, 0.8)))
        said = max(1, n // 2) if b.rng.random() < 0.5 else n
        b.add(Call(b.tokens(max(1, size - n)), b.tokens(said), n, b.program()))


def chat(b: Builder, count: int) -> None:
    """A system prompt of 80 tokens, messages of 150 and answers of 150 in the middle, up to 1,500 and 600."""
    system = b.text(80, 80)
    for _ in range(count):
        message = b.tokens(int(min(1500, b.rng.lognormal(np.log(150), 0.8))) + 1)
        answer = b.tokens(int(min(600, b.rng.lognormal(np.log(150), 0.7))) + 1)
        b.add(Call(np.concatenate([system, message]), answer, min(1024, 2 * len(answer)), b.program()))


KINDS: dict[str, tuple[Callable[[Builder, int], None], int]] = {
    "equal": (equal, 0),
    "pareto": (pareto, 0),
    "chat": (chat, 80),
}
"""What adds so many calls, and how many tokens their prompts have in common."""


def work(kind: str, count: int, seed: int = 0) -> Work:
    """count requests of a kind of ``KINDS``."""
    add, shared = KINDS[kind]
    builder = Builder(np.random.default_rng([seed, *kind.encode()]))
    add(builder, count)
    calls = builder.calls
    aborted = frozenset(builder.rng.choice(count, int(ABORTED * count), replace=False).tolist())
    said = [len(call.output) + (len(call.output) < call.max_new_tokens) for call in calls]
    for index in sorted(aborted):
        said[index] = int(builder.rng.integers(0, said[index]))
    return Work(calls, shared, said, aborted)


def run(todo: Work, pool: int, step_time: StepTime, **config: object) -> Done:
    """Serve all of it. RuntimeError if a request does not end as it should, or a slot is lost."""
    clock = Clock()
    outputs = [[*call.output.tolist(), EOS] for call in todo.calls]
    runner = TraceRunner(outputs, step_time, clock)
    settings = SchedulerConfig(
        max_total_tokens=pool,
        context_length=todo.largest + 1,
        max_queued_requests=len(todo.calls),
        **config,  # type: ignore[arg-type]
    )
    scheduler = Scheduler(settings, runner, vocabulary(), NoGrammars(), clock=clock, rng=random.Random(0))
    scheduler.add([_command(call, index) for index, call in enumerate(todo.calls)])
    due = {index for index in todo.aborted if not todo.said[index]}
    ended: dict[int, str] = {}
    heard = [0] * len(todo.calls)
    while scheduler.has_work():
        for index in due:
            scheduler.abort(str(index))
        due = set()
        for output in scheduler.step():
            index = int(output.rid)
            heard[index] += len(output.token_ids)
            if output.finish is not None:
                ended[index] = output.finish.type
            elif index in todo.aborted and heard[index] >= todo.said[index]:
                due.add(index)
    _check(todo, ended, scheduler)
    return Done(runner.computed_tokens, runner.forwards, clock.now, scheduler.counters.retractions)


def _check(todo: Work, ended: dict[int, str], scheduler: Scheduler) -> None:
    scheduler.check()
    wrong = [i for i in range(len(todo.calls)) if (ended.get(i) == "abort") != (i in todo.aborted)]
    if len(ended) != len(todo.calls) or wrong or set(ended.values()) - {"stop", "length", "abort"}:
        raise RuntimeError(
            f"{len(ended)} of {len(todo.calls)} requests ended, {wrong[:5]} not as they should"
        )
    if scheduler.memory.available != scheduler.memory.size:
        raise RuntimeError(
            f"nothing runs, and {scheduler.memory.available} of {scheduler.memory.size} slots can be had"
        )


def _command(call: Call, index: int) -> GenerateCommand:
    return GenerateCommand(
        rid=str(index),
        token_ids=call.prompt.tolist(),
        params=SamplingParams(max_new_tokens=call.max_new_tokens, temperature=0.0, seed=index),
        stream=True,
    )


def print_pool(step_time: StepTime, count: int, seed: int) -> None:
    """The table of ``--pool``."""
    print(
        f"{count} requests at once, {ABORTED:.0%} aborted, in a pool of {TIGHT} × the largest one and in an ample one\n"
        f"computed: tokens. steps: forward passes; least: no schedule has fewer (slots × steps ÷ slots of the pool).\n"
        f"×: throughput ÷ that of the ample pool, in tokens computed and in modelled time ({step_time.name}); "
        f"at most: with the least steps\n{'':8}{'pool':>9}{'computed':>10}{'steps':>7}{'least':>7}{'seconds':>9}"
        f"{'retract':>8}{'× tokens':>10}{'× time':>8}{'at most':>9}"
    )
    for kind in KINDS:
        todo = work(kind, count, seed)
        ample = run(todo, todo.total, step_time)
        pool = int(TIGHT * todo.largest)
        tight = run(todo, pool, step_time)
        for name, size, done in (("", todo.total, ample), (kind, pool, tight)):
            least = todo.least_steps(size)
            seconds = ample.seconds + step_time.base * (least - ample.steps)
            print(
                f"{name:8}{size:>9,}{done.computed:>10,}{done.steps:>7,}{least:>7,.0f}{done.seconds:>9.2f}"
                f"{done.retractions:>8}{ample.computed / done.computed:>10.2f}{ample.seconds / done.seconds:>8.2f}"
                f"{ample.seconds / seconds:>9.2f}",
                flush=True,
            )
