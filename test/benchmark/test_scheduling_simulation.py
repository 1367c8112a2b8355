"""Small traces through the real scheduler: everything ends, counts add up, nothing passes its bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmark.scheduling.bound import any_schedule, best_eviction
from benchmark.scheduling.evaluate import BASELINES, NO_CACHE, NO_TREE, Settings, evaluate, play, traces
from benchmark.scheduling.model import PROFILES, StepTime
from benchmark.scheduling.plots import write_plots
from benchmark.scheduling.pool import KINDS, TIGHT, Work, run, work
from benchmark.scheduling.report import summary
from benchmark.scheduling.simulation import Simulation
from benchmark.scheduling.steady import steady_microseconds
from benchmark.scheduling.stopwatch import COLUMNS
from benchmark.scheduling.trace import Call, Trace, relabelled
from benchmark.scheduling.union import unite
from benchmark.scheduling.workloads import BATCHES, MIXED, batch, mixed
from trellis.runtime.executor.contract import Extend
from trellis.runtime.scheduler import POLICIES, SchedulerConfig

SMALL = Settings(step_time=PROFILES["gpu"], scale=0.05, sizes=(0.2,))
NAMES = (*BATCHES, MIXED)


def small(name: str) -> Trace:
    return mixed(4.0, 0.05) if name == MIXED else batch(name, 0.05)


@pytest.mark.parametrize("name", NAMES)
def test_every_call_ends_in_its_turn_and_every_prompt_token_is_cached_or_computed(name: str) -> None:
    trace = small(name)
    union = unite(trace)
    capacity = max(trace.longest + 1, union.working_set // 5)
    config = SchedulerConfig(max_total_tokens=capacity, context_length=trace.longest + 1)
    simulation = Simulation(trace, config, PROFILES["gpu"])
    played = simulation.play()
    scheduler = simulation.scheduler
    scheduler.check()
    assert sorted(played.order) == sorted(
        [(kind, i) for i in range(len(trace.calls)) for kind in ("start", "end")]
    )
    place = {event: at for at, event in enumerate(played.order)}
    for index, (call, counts) in enumerate(zip(trace.calls, played.counts, strict=True)):
        assert all(place["end", earlier] < place["start", index] for earlier in call.after)
        assert counts.prompt_tokens == len(call.prompt)
        assert counts.cached_tokens <= call.reusable
        assert counts.completion_tokens - len(call.output) in (0, 1)
        assert 0 < played.first_token[index] <= played.duration
    counters = scheduler.counters
    assert counters.cached_tokens == played.hit_tokens
    assert counters.cached_tokens + counters.computed_prompt_tokens == trace.prompt_tokens
    assert played.hit_tokens <= best_eviction(union, played.order, capacity) <= any_schedule(union)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_computes_what_it_does_not_find_and_no_more_without_retractions(name: str) -> None:
    trace = batch("judge", 0.2)
    played = play(trace, 20_000, name, SMALL)
    decoded = sum(max(0, len(call.computed) - len(call.prompt)) for call in trace.calls)
    assert played.retractions == 0
    assert played.computed_tokens == trace.prompt_tokens - played.hit_tokens + decoded


def test_a_large_cache_finds_all_that_any_schedule_can() -> None:
    for name in BATCHES:
        trace = small(name)
        union = unite(trace)
        played = play(trace, 3 * union.working_set + trace.longest, "lpm", SMALL)
        assert played.hit_tokens == any_schedule(union), name


def test_baselines_find_whole_earlier_prompts_or_nothing() -> None:
    chat, questions = batch("chat-short", 0.1), batch("few-shot", 0.2)
    ample = 10 * unite(chat).working_set
    assert play(chat, ample, NO_TREE, SMALL).hit_tokens >= 0.9 * any_schedule(unite(chat))
    assert play(questions, ample, NO_TREE, SMALL).hit_tokens == 0
    assert play(questions, ample, "fcfs", SMALL).hit_tokens > 0
    assert play(chat, ample, NO_CACHE, SMALL).hit_tokens == 0


def test_relabelling_keeps_lengths_and_dependencies() -> None:
    trace = batch("tree-of-thought", 0.1)
    for whole_prompts in (True, False):
        other = relabelled(trace, whole_prompts)
        for one, two in zip(trace.calls, other.calls, strict=True):
            assert (len(one.prompt), len(one.output)) == (len(two.prompt), len(two.output))
            assert replace(one, prompt=two.prompt, output=two.output) == two


def test_a_run_is_the_same_every_time() -> None:
    trace = mixed(6.0, 0.1)
    one, two = (play(trace, 20_000, "lpm", SMALL) for _ in range(2))
    assert one.order == two.order
    assert one.first_token == two.first_token


def test_step_time_counts_tokens_rows_and_pairs() -> None:
    empty = np.zeros(0, np.int32)
    extends = [
        Extend(np.zeros(3, np.int32), 4, np.zeros(7, np.int32), 2),
        Extend(np.zeros(1, np.int32), 0, np.zeros(1, np.int32), 0),
    ]
    assert StepTime("x", 1.0, 0.0, 0.0, 0.0).of([Extend(empty, 0, empty, 0)]) == 1.0
    assert StepTime("x", 0.0, 1.0, 0.0, 0.0).of(extends) == 4
    assert StepTime("x", 0.0, 0.0, 1.0, 0.0).of(extends) == 8
    assert StepTime("x", 0.0, 0.0, 0.0, 1.0).of(extends) == (5 + 6 + 7) + 1


def test_the_eleven_traces_make_a_summary() -> None:
    cells = []
    for trace in traces(SMALL):
        cells += evaluate(trace, replace(SMALL, scale=0.02, policies=("lpm", "fcfs")))
    assert {cell.trace for cell in cells} == set(NAMES)
    assert len(NAMES) == 11
    text = "\n".join(summary(cells))
    assert all(name in text for name in ("lpm", "fcfs", *BASELINES, "mixed arrivals"))


def test_plots_are_written(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    cells = list(evaluate(batch("react", 0.05), replace(SMALL, sizes=(0.2, 0.5))))
    written = write_plots(cells, tmp_path)
    assert [path.name for path in written] == ["react-hit-rate.png", "react-ttft.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_the_parts_of_a_steady_step_add_up() -> None:
    cost = steady_microseconds(requests=4, steps=3, stream=True, rounds=1)
    assert set(cost) == set(COLUMNS)
    assert all(value > 0 for value in cost.values())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_pool_of_hardly_more_than_the_largest_request_is_used_well(kind: str) -> None:
    """Everything ends, a tenth by abort; hardly a token is computed twice, and not many more steps are taken than any
    schedule must take in that pool."""
    todo = work(kind, 60)
    pool = int(TIGHT * todo.largest)
    tight, ample = (run(todo, size, PROFILES["gpu"]) for size in (pool, todo.total))
    assert len(todo.aborted) == 6
    assert todo.least_steps(todo.total) <= ample.steps <= todo.least_steps(pool) + 5
    assert todo.least_steps(pool) <= tight.steps <= 2 * todo.least_steps(pool)
    assert ample.computed <= tight.computed <= 1.1 * ample.computed


def test_the_least_steps_are_those_of_the_arithmetic() -> None:
    """Two requests of three slots and three tokens hold 3 + 4 + 5 slots each; in 24 slots both fit at any time, in 12
    on average two and in 6 one."""
    calls = [Call(np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), 3, n) for n in range(2)]
    both = Work(calls, 0, [3, 3], frozenset())
    assert [both.least_steps(pool) for pool in (24, 12, 6, 4)] == [3, 3, 4, 6]
