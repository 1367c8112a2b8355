"""A group of two processes, joined by gloo: this one is rank 0."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_fakes import FollowingStep, logits_of, steps_of_a_session

from trellis.errors import BackendError
from trellis.runtime.distributed.contract import GroupBroken, Place, inbox_of
from trellis.runtime.distributed.group import Group
from trellis.runtime.distributed.leader import LeadingStep
from trellis.runtime.distributed.wire import Message
from trellis.runtime.executor import ModelRunner, build_runner, step
from trellis.runtime.executor.contract import Extend, SampleRow
from trellis.runtime.manager.transport import SocketDirectory, ZmqSender
from trellis.runtime.messages import SamplingParams

WORKER = Path(__file__).parent / "rank_worker.py"


class Pair:
    """This process and another one, or more."""

    def __init__(self, timeout: float, size: int = 2) -> None:
        self.directory = SocketDirectory()
        path = str(self.directory.path / "group")
        ranks = range(1, size)
        self.others = [
            subprocess.Popen(
                [sys.executable, str(WORKER), str(rank), str(size), path, str(timeout)],
                stdin=subprocess.PIPE,
                text=True,
            )
            for rank in ranks
        ]
        self.outboxes: list[ZmqSender[Message]] = [ZmqSender(inbox_of(path, rank)) for rank in ranks]
        self.group = Group(Place(0, size, path, timeout), torch.device("cpu"))

    @property
    def other(self) -> subprocess.Popen[str]:
        return self.others[0]

    def runner(self, model: Path, tokens: Sequence[int] = ()) -> ModelRunner:
        """Rank 0's part of a model, whose other parts the other processes load. tokens: sampled in the step before."""
        for other in self.others:
            assert other.stdin is not None
            other.stdin.write(f"{model} {step.EAGER_VALUES}\n")
            other.stdin.flush()
        runner = build_runner(model, "float32", num_slots=256, executor="torch", ranks=self.group)
        if tokens:
            runner.step = FollowingStep(runner, list(tokens))
        runner.step = LeadingStep(runner.step, self.group, self.outboxes, runner.followed)
        return runner

    def close(self) -> None:
        for other in self.others:
            other.send_signal(signal.SIGCONT)
            assert other.stdin is not None
            other.stdin.close()
        try:
            for other in self.others:
                other.wait(20)
        finally:
            for other, outbox in zip(self.others, self.outboxes, strict=True):
                other.kill()
                outbox.close()
            self.group.leave()
            self.directory.remove()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair(timeout=60)
    yield pair
    pair.close()


@pytest.fixture
def doomed(pair: Pair) -> Iterator[Pair]:
    """A pair of one's own. A process is in one group, so this is for the last tests of the file."""
    pair.group.leave()
    doomed = Pair(timeout=5)
    yield doomed
    doomed.close()


def forward(runner: ModelRunner, extends: list[Extend]) -> torch.Tensor:
    rows = runner.forward(extends)
    return rows.take(range(len(rows)))


def whole(model: Path) -> ModelRunner:
    return build_runner(model, "float32", num_slots=256, executor="torch")


def test_logits_are_those_of_one_process(pair: Pair, tiny: Any) -> None:
    alone, both = whole(tiny.path), pair.runner(tiny.path)
    want = logits_of(lambda extends: forward(alone, extends))
    assert want.abs().max() > 1
    got = logits_of(lambda extends: forward(both, extends))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_a_group_is_on_the_loopback_interface_only(pair: Pair) -> None:
    import psutil

    for process in (psutil.Process(), psutil.Process(pair.other.pid)):
        listening = [
            each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN
        ]
        assert set(listening) <= {"127.0.0.1", "::1"}


@pytest.mark.usefixtures("pair")
def test_a_process_is_in_one_group(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="in a group"):
        Group(Place(0, 2, str(tmp_path / "other"), 1.0), torch.device("cpu"))


def test_logits_that_are_too_many_to_compute_at_once(
    pair: Pair, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "EAGER_VALUES", 0)
    alone, both = whole(tiny_llama.path), pair.runner(tiny_llama.path)
    extends = steps_of_a_session()[0]
    n = sum(extend.n_logits for extend in extends)
    want = alone.score(alone.forward(extends), range(n), [5] * n, 3)
    got = both.score(both.forward(extends), range(n), [5] * n, 3)
    assert got[0] == pytest.approx(want[0], abs=1e-4)
    assert [[token for token, _ in row] for row in got[1]] == [[token for token, _ in row] for row in want[1]]


def test_what_is_sampled_is_what_one_process_samples(pair: Pair, tiny_llama: Any) -> None:
    alone, both = whole(tiny_llama.path), pair.runner(tiny_llama.path)
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=1.0, top_p=0.9)):
        rows = [SampleRow(row, params, seed=7 + row, step=0) for row in range(3)]
        extends = steps_of_a_session()[0]
        for extend in extends:
            extend.logits_from = len(extend.token_ids) - 1
        sampled = [runner.sample(runner.forward(extends), rows).token_ids for runner in (alone, both)]
        assert sampled[0] == sampled[1]


def test_the_others_get_the_tokens_that_are_on_the_device_of_rank_0(pair: Pair, tiny_llama: Any) -> None:
    alone, both = whole(tiny_llama.path), pair.runner(tiny_llama.path, tokens=[11, 22, 33])
    first, second, *_ = steps_of_a_session()
    for runner in (alone, both):
        runner.forward(first)
    known = [replace(extend, token_ids=extend.token_ids.copy()) for extend in second]
    for at, place, token in ((1, 2, 33), (2, 0, 11)):
        known[at].token_ids[0] = token
        second[at].follows = place
    torch.testing.assert_close(forward(both, second), forward(alone, known), atol=1e-4, rtol=0)


def test_a_bad_batch_does_not_break_the_group(pair: Pair, tiny_llama: Any) -> None:
    both = pair.runner(tiny_llama.path)
    with pytest.raises(ValueError, match="at least one extend"):
        both.forward([])
    assert len(forward(both, steps_of_a_session()[0])) > 0


def test_a_failure_of_rank_0_within_a_step_breaks_the_group(
    pair: Pair, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair.runner(tiny_llama.path)

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(both.step, "_step", type("Failing", (), {"forward": fail})())
    monkeypatch.setattr(both.step, "_tell", lambda _: None)  # the others would wait for the sums of this step
    with pytest.raises(GroupBroken, match="a step failed: MemoryError: no room"):
        both.forward(steps_of_a_session()[0])


@pytest.mark.slow
def test_logits_of_four_processes(pair: Pair, tiny_of: Any) -> None:
    pair.group.leave()
    four = Pair(timeout=60, size=4)
    try:
        for family in ("llama-biases", "one-kv-head", "odd-vocabulary"):
            model = tiny_of(family).path
            alone, together = whole(model), four.runner(model)
            want = logits_of(functools.partial(forward, alone))
            torch.testing.assert_close(
                logits_of(functools.partial(forward, together)), want, atol=1e-4, rtol=0
            )
    finally:
        four.close()


def test_a_stopped_rank_is_noticed_by_its_silence(doomed: Pair, tiny_llama: Any) -> None:
    both = doomed.runner(tiny_llama.path)
    forward(both, steps_of_a_session()[0])
    doomed.other.send_signal(signal.SIGSTOP)
    with pytest.raises(GroupBroken, match="a step failed"):
        forward(both, steps_of_a_session()[1])


def test_a_rank_that_died_is_noticed_while_there_is_nothing_to_do(
    doomed: Pair, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trellis.runtime.distributed import leader

    both = doomed.runner(tiny_llama.path)
    assert isinstance(both.step, LeadingStep)
    monkeypatch.setattr(leader, "MEET_EVERY", 0.0)
    both.step.stay_in_touch()
    doomed.other.kill()
    doomed.other.wait()
    with pytest.raises(GroupBroken, match="a sign of life failed"):
        both.step.stay_in_touch()
