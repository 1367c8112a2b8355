"""Plays traces for every policy and cache size and puts the results beside what was possible."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmark.scheduling.bound import any_schedule, best_eviction, offline_orders
from benchmark.scheduling.model import StepTime
from benchmark.scheduling.simulation import Played, Simulation
from benchmark.scheduling.trace import Trace, relabelled
from benchmark.scheduling.union import Union, unite
from benchmark.scheduling.workloads import BATCHES, MIXED, batch, mixed
from trellis.runtime.scheduler import POLICIES, SchedulerConfig

NO_TREE, NO_CACHE = "no-tree", "no-cache"
BASELINES = (NO_TREE, NO_CACHE)
SIZES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Settings:
    """load: rate of the mixed trace, as a share of what the server does when all its programs are there at once."""

    step_time: StepTime
    scale: float = 1.0
    seed: int = 0
    load: float = 0.8
    chunk: int = 2048
    sizes: Sequence[float] = SIZES
    policies: Sequence[str] = ()

    def rows(self) -> list[str]:
        """The policies (all that there are, if none is named) and the baselines."""
        first = ["lpm", "fcfs"]
        rest = sorted(name for name in POLICIES if name not in first)
        return [*(self.policies or [name for name in first if name in POLICIES] + rest), *BASELINES]


@dataclass(frozen=True)
class Cell:
    """One trace, cache size and policy. Rates are shares of all prompt tokens; times are virtual seconds.

    bound: no schedule has a higher hit rate. offline: an off-line schedule reaches this. evictions: the best that any
    eviction gives in the order in which the calls ran. optimum: what the ratio is taken to. cpu_step, cpu_request: CPU
    seconds of scheduler a step, and a running request and step.
    """

    trace: str
    size: float
    capacity: int
    policy: str
    hit_rate: float
    bound: float
    offline: float
    evictions: float
    computed: int
    ttft_mean: float
    ttft_p99: float
    retractions: int
    duration: float
    cpu_step: float
    cpu_request: float
    optimum: float = 0.0

    @property
    def ratio(self) -> float:
        return self.hit_rate / self.optimum if self.optimum else 1.0


def traces(settings: Settings, names: Sequence[str] = ()) -> Iterator[Trace]:
    """The eleven traces, or those of the given names."""
    for name in names or (*BATCHES, MIXED):
        if name != MIXED:
            yield batch(name, settings.scale, settings.seed)
            continue
        at_once = mixed(1e9, settings.scale, settings.seed)
        played = play(at_once, unite(at_once).working_set, "lpm", settings)
        programs = 1 + max(call.program for call in at_once.calls)
        yield mixed(settings.load * programs / played.duration, settings.scale, settings.seed)


def play(trace: Trace, capacity: int, policy: str, settings: Settings) -> Played:
    """One run. A baseline runs first come, first served, on a trace that shows the tree only what it would find."""
    if policy in BASELINES:
        trace, policy = relabelled(trace, whole_prompts=policy == NO_TREE), "fcfs"
    config = SchedulerConfig(
        max_total_tokens=capacity,
        context_length=trace.longest + 1,
        chunked_prefill_size=settings.chunk,
        policy=policy,
    )
    return Simulation(trace, config, settings.step_time).play()


def evaluate(trace: Trace, settings: Settings) -> Iterator[Cell]:
    """All sizes and policies of a trace. The pool is the share of the working set, or the longest call if that is
    more: the scheduler refuses a call that does not fit."""
    union = unite(trace)
    orders = offline_orders(trace, union)
    for size in settings.sizes:
        capacity = max(round(size * union.working_set), trace.longest + 1)
        reached = max(best_eviction(union, order, capacity) for order in orders)
        row = []
        for policy in settings.rows():
            played = play(trace, capacity, policy, settings)
            row.append(_cell(trace, union, size, capacity, policy, reached, played))
        yield from _with_optimum(row, trace.open_loop)


def _cell(
    trace: Trace, union: Union, size: float, capacity: int, policy: str, reached: int, played: Played
) -> Cell:
    total = trace.prompt_tokens
    first = np.array(played.first_token)
    steps = played.step_seconds
    evictions = best_eviction(union, played.order, capacity)
    if policy not in BASELINES and not played.hit_tokens <= evictions <= any_schedule(union):
        raise RuntimeError(
            f"{trace.name}, {capacity} tokens, {policy}: {played.hit_tokens} tokens were found in the cache; at most "
            f"{evictions} can be by any eviction, {any_schedule(union)} by any schedule: one of these counts is wrong"
        )
    return Cell(
        trace=trace.name,
        size=size,
        capacity=capacity,
        policy=policy,
        hit_rate=played.hit_tokens / total,
        bound=any_schedule(union) / total,
        offline=reached / total,
        evictions=evictions / total,
        computed=played.computed_tokens,
        ttft_mean=float(first.mean()),
        ttft_p99=float(np.quantile(first, 0.99)),
        retractions=played.retractions,
        duration=played.duration,
        cpu_step=statistics.mean(steps),
        cpu_request=sum(steps) / sum(played.running),
    )


def _with_optimum(row: list[Cell], open_loop: bool) -> list[Cell]:
    """Where programs are all there at once the optimum is over all schedules. Where they arrive by themselves a schedule
    that waits would win; there it is the best eviction for the best of the orders that were played."""
    if not open_loop:
        return [replace(cell, optimum=cell.bound) for cell in row]
    best = max(cell.evictions for cell in row if cell.policy not in BASELINES)
    return [replace(cell, optimum=min(cell.bound, best)) for cell in row]
