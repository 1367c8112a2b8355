"""The scheduler with a runner that launches: the same answers, with a step on the device while the last one is entered."""

from __future__ import annotations

import random

import pytest
import torch
from cuda_fakes import FakeDevice, FakeMark, fixed_attention, make_model
from scheduler_fakes import SIZE, Harness, choices, command

from trellis.runtime.cuda.build import TABLE_ROWS
from trellis.runtime.cuda.graphs import DecodeGraphs, graph_sizes
from trellis.runtime.cuda.runner import DeviceRunner
from trellis.runtime.cuda.step import DeviceStep
from trellis.runtime.cuda.tokens import TokenTable
from trellis.runtime.cuda.waits import Waits
from trellis.runtime.executor import KVPool, ModelRunner
from trellis.runtime.executor.contract import DeviceLost

MODEL = make_model(vocab=SIZE, seed=3)
POOL = 300


@torch.inference_mode()
def device_runner(graphs: bool = True) -> DeviceRunner:
    device = FakeDevice()
    pool = KVPool(MODEL.config, POOL, torch.float32)
    tokens, attention = TokenTable(TABLE_ROWS, device.where), fixed_attention(MODEL.config, pool)
    made = DecodeGraphs(MODEL, attention, device, tokens, graph_sizes(8), 2048) if graphs else None
    if made is not None:
        made.capture()
    step = DeviceStep(MODEL, attention, device, tokens, made)
    return DeviceRunner(MODEL.config, pool, step, device, tokens, Waits(device))


def harness(runner, overlap: bool = False, **config) -> Harness:
    made = Harness(pool=POOL, overlap=overlap, rng=random.Random(1), context_length=60, **config)
    made.runner = made.scheduler._runner = runner
    return made


def workload():
    shared = "sharedprefix"
    return [
        *[command(f"greedy{i}", shared[: 3 + i], 12, ignore_eos=True) for i in range(4)],
        *[command(f"drawn{i}", shared[i:], 9, temperature=1.2, seed=i) for i in range(3)],
        command(
            "limited", "abc", 10, temperature=0.9, top_k=7, top_p=0.8, min_p=0.02, seed=4, ignore_eos=True
        ),
        command("biased", "xyz", 8, logit_bias={4: 9.0}, ignore_eos=True),
    ]


def special():
    return [
        command("choice", "abc", 12, constraint=choices("hello", "help", "hold")),
        command("reported", "abd", 5, return_logprob=True, top_logprobs_num=2, ignore_eos=True),
        command("penalised", "abe", 6, repetition_penalty=1.4, ignore_eos=True),
        command("long", "abf", 6, min_new_tokens=4),
    ]


def tokens_of(answers):
    return {rid: (answer.token_ids, answer.finish.type) for rid, answer in answers.items()}


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("requests", [workload, lambda: workload() + special()], ids=["free", "mixed"])
def test_answers_are_those_of_a_runner_on_a_cpu(requests, graphs, overlap):
    want = harness(ModelRunner(MODEL, POOL, executor="torch"), chunked_prefill_size=16).run(*requests())
    runner = device_runner(graphs)
    got = harness(runner, overlap, chunked_prefill_size=16).run(*requests())
    assert tokens_of(got) == tokens_of(want)
    assert (runner.step.graph_steps > 0) == graphs
    if "reported" in got:
        assert got["reported"].logprobs == pytest.approx(want["reported"].logprobs, abs=1e-4)


def test_a_step_is_launched_before_the_results_of_the_last_are_waited_for():
    runner = device_runner()
    running = harness(runner, overlap=True)
    running.scheduler.add([command("r", "abc", 20, ignore_eos=True)])
    running.step()
    running.step()
    log = runner.device.log
    log.clear()
    for _ in range(5):
        running.step()
        assert [event for event in log if event != "pinned"] == ["mark", "wait"]
        log.clear()
    assert running.scheduler.counters.forward_passes == 6  # of seven: the last is on the device
    running.run()
    assert len(running.answer("r").token_ids) == 20
    assert runner.waits.counts["results"] == 20


def test_without_overlap_each_step_is_waited_for_in_turn():
    runner = device_runner()
    running = harness(runner)
    running.run(command("r", "abc", 5, ignore_eos=True))
    marks = [event for event in runner.device.log if event in ("mark", "wait")]
    assert marks == ["mark", "wait"] * 5


def test_how_steps_were_computed_is_in_the_stats():
    running = harness(device_runner(), overlap=True)
    running.run(*workload())
    stats = running.scheduler.stats()["executor"]
    assert stats["graph_steps"] > 0
    assert "an extend has several tokens" in stats["eager_steps"]
    assert stats["waits"]["results"] == running.scheduler.counters.forward_passes


class Failing:
    """Takes the place of a method; raises at its n-th call."""

    def __init__(self, method, at: int, error: Exception) -> None:
        self.method, self.at, self.error, self.calls = method, at, error, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return self.method(*args)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_a_step_that_finds_no_memory_fails_its_requests_alone(overlap):
    runner = device_runner()
    runner.step.forward = Failing(runner.step.forward, 3, torch.OutOfMemoryError("CUDA out of memory"))
    running = harness(runner, overlap)
    running.scheduler.add([command("old", "abc", 9, ignore_eos=True)])
    running.step()
    running.step()
    running.step()
    later = command("new", "abcdef", 6, ignore_eos=True)
    answers = running.run(later)
    assert answers["old"].finish.type == "error"
    assert "CUDA out of memory" in answers["old"].finish.message
    want = harness(ModelRunner(MODEL, POOL, executor="torch")).run(later)
    assert answers["new"].token_ids == want["new"].token_ids
    assert running.scheduler.counters.failed_steps == 1
    assert "give back" in runner.device.log
    running.scheduler.flush_cache()
    assert running.free == POOL


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_a_failure_that_shows_only_in_the_results_fails_the_step(overlap, monkeypatch):
    runner = device_runner()
    waiting = Failing(FakeMark.wait, 2, RuntimeError("a kernel reported an error"))
    monkeypatch.setattr(FakeMark, "wait", lambda mark: waiting(mark))
    running = harness(runner, overlap)
    answers = running.run(command("r", "abc", 9, ignore_eos=True))
    assert answers["r"].finish.type == "error"
    assert running.run(command("s", "abc", 4, ignore_eos=True))["s"].finish.type == "length"
    assert running.scheduler.counters.failed_steps == 1


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_a_lost_device_ends_the_loop(overlap):
    runner = device_runner()
    running = harness(runner, overlap)
    running.scheduler.add([command("r", "abc", 9, ignore_eos=True)])
    running.step()
    runner.device.broken = True
    runner.step.forward = Failing(runner.step.forward, 1, RuntimeError("CUDA error"))
    with pytest.raises(DeviceLost):
        running.run()
