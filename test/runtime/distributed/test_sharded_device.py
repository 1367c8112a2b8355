"""A group whose ranks compute on devices of their own: steps that are launched ahead, and graphs, on each at the same time.

The devices are fakes, and the ranks threads.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_fakes import FakeDevice, fixed_attention
from rank_fakes import ThreadGroup, in_threads
from scheduler_fakes import Harness, choices, command

from trellis.runtime.cuda import build
from trellis.runtime.cuda.build import DeviceSettings, build_device_runner, least
from trellis.runtime.cuda.graphs import DecodeGraphs, graph_sizes
from trellis.runtime.cuda.runner import DeviceRunner
from trellis.runtime.cuda.step import DeviceStep
from trellis.runtime.cuda.tokens import TokenTable
from trellis.runtime.cuda.waits import Waits
from trellis.runtime.distributed import join
from trellis.runtime.distributed.contract import Place
from trellis.runtime.distributed.follower import Follower
from trellis.runtime.distributed.leader import LeadingStep
from trellis.runtime.distributed.wire import Message
from trellis.runtime.executor import KVPool, ModelRunner
from trellis.runtime.manager.transport import MemoryChannel
from trellis.runtime.models import load_model

POOL = 300


@dataclass(frozen=True)
class Part:
    group: ThreadGroup
    runner: DeviceRunner


def part_of(path: Path, group: ThreadGroup, graphs: bool) -> Part:
    with torch.inference_mode():
        model = load_model(path, torch.float32, ranks=group)
        device = FakeDevice(tape=False)
        pool, tokens = KVPool(model.config, POOL, torch.float32), TokenTable(64, device.where)
        attention = fixed_attention(model.config, pool)
        made = DecodeGraphs(model, attention, device, tokens, graph_sizes(8), 2048) if graphs else None
        if made is not None:
            made.capture()
        step = DeviceStep(model, attention, device, tokens, made)
        return Part(group, DeviceRunner(model.config, pool, step, device, tokens, Waits(device)))


def run(runner: Any, overlap: bool) -> dict[str, Any]:
    made = Harness(
        pool=POOL, overlap=overlap, rng=random.Random(1), context_length=60, chunked_prefill_size=16
    )
    made.runner = made.scheduler._runner = runner
    requests = [
        *[command(f"greedy{i}", "sharedprefix"[: 3 + i], 12, ignore_eos=True) for i in range(4)],
        *[command(f"drawn{i}", "sharedprefix"[i:], 9, temperature=1.2, seed=i) for i in range(3)],
        command("choice", "abc", 12, constraint=choices("hello", "help", "hold")),
        command("reported", "abd", 5, return_logprob=True, top_logprobs_num=2, ignore_eos=True),
    ]
    return {rid: answer.token_ids for rid, answer in made.run(*requests).items()}


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_answers_are_those_of_one_process(tiny_of: Any, overlap: bool, graphs: bool) -> None:
    path = tiny_of("small-vocabulary").path
    leading, following = in_threads(2, lambda group: part_of(path, group, graphs))
    inbox: MemoryChannel[Message] = MemoryChannel()
    stopping = threading.Event()
    thread = threading.Thread(
        target=Follower(following.runner, following.group).run,  # type: ignore[arg-type]
        args=(inbox, stopping),
    )
    thread.start()
    try:
        runner = leading.runner
        runner.step = LeadingStep(runner.step, leading.group, [inbox], runner.followed)  # type: ignore[arg-type, assignment]
        got = run(runner, overlap)
    finally:
        leading.runner.step.end()  # type: ignore[attr-defined]
        thread.join(60)
    assert got == run(ModelRunner(load_model(path, torch.float32), POOL, executor="torch"), False)
    assert (leading.group.shared > 0) == overlap
    assert (following.runner.step.graph_steps > 0) == graphs
    assert runner.stats()["graph_steps"] == following.runner.step.graph_steps


def test_all_pools_are_as_large_as_the_smallest_can_be() -> None:
    device = FakeDevice()
    assert in_threads(3, lambda group: least(1000 - group.rank, group, device)) == [998, 998, 998]


def test_a_part_is_measured_together_with_the_others(tiny_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "draw_later", lambda *_: None)  # Triton's interpreter is for one thread
    path = tiny_of("small-vocabulary").path

    def measure(group: ThreadGroup) -> int:
        model = load_model(path, torch.float32, ranks=group)
        device = FakeDevice(total=1 << 24, used=group.rank << 22)
        settings = DeviceSettings(attention="torch", chunk=16, running=4, graph_max=0, ops="torch")
        return build_device_runner(model, settings, device, group).pool.slots

    first, second = in_threads(2, measure)
    assert first == second > 0


class FailsAfterwards(FakeDevice):
    """The last capture fails when the others have done it."""

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        replay = super().capture(body)
        if self.log.count("capture") == len(graph_sizes(4)):
            raise RuntimeError("operation not permitted when stream is capturing")
        return replay


def test_graphs_are_used_by_all_ranks_or_none(tiny_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_attention", lambda model, pool, _: fixed_attention(model.config, pool))
    settings = DeviceSettings(num_slots=POOL, running=4, graph_max=4, context_length=60, ops="torch")

    def captured(failing: int) -> list[tuple[int, ...]]:
        def work(group: ThreadGroup) -> tuple[int, ...]:
            model = load_model(tiny_of("small-vocabulary").path, torch.float32, ranks=group)
            device = (FailsAfterwards if group.rank == failing else FakeDevice)(tape=False)
            graphs = build_device_runner(model, settings, device, group).step.graphs
            assert graphs is not None
            return graphs.captured

        return in_threads(2, work)

    assert captured(failing=-1) == [graph_sizes(4)] * 2
    assert captured(failing=0) == captured(failing=1) == [(), ()]


def test_graphs_are_freed_before_the_group_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Runner:
        step, followed = SimpleNamespace(name="a step"), None

        def release(self) -> None:
            done.append("graphs")

    group = SimpleNamespace(leave=lambda: done.append("group"))
    monkeypatch.setattr(join, "join_group", lambda *_: (group, Runner()))
    join.lead_group(Place(0, 1, "nowhere", 1.0), "cuda", lambda _: pytest.fail("nothing is built")).close()
    assert done == ["graphs", "group"]
