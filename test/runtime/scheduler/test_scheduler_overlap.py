"""Steps that are computed while the next one is planned."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from scheduler_fakes import EOS, FakeRunner, Harness, assert_as_alone, choices, command

from trellis.runtime.scheduler.plan import PlannedExtend


class GatedRunner(FakeRunner):
    """Its forward passes from the second on wait until ``gate`` is set."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.gate = threading.Event()

    def forward(self, extends):
        if self.forwards >= 1:
            assert self.gate.wait(30), "nothing was planned while this step was computed"
        return super().forward(extends)


def overlapped(**config) -> Harness:
    return Harness(overlap=True, **config)


def gated(**config) -> Harness:
    harness = overlapped(**config)
    harness.runner = harness.scheduler._runner = GatedRunner(harness.config.max_total_tokens)
    return harness


def test_the_next_step_is_planned_and_the_last_one_entered_while_one_is_computed():
    harness = gated()
    request = command("r", "abc", 6, ignore_eos=True)
    harness.scheduler.add([request])
    harness.step()  # the prefill is computed
    assert harness.scheduler.has_work()
    harness.step()  # the second pass waits at the gate, and still the first token is given out
    assert harness.runner.forwards == 1
    assert len(harness.answer("r").token_ids) == 1
    harness.runner.gate.set()
    harness.run()
    assert_as_alone(harness, request)


@pytest.mark.parametrize("overlap", [False, True])
def test_overlap_changes_neither_answers_nor_passes(overlap):
    harness = Harness(overlap=overlap, chunked_prefill_size=4)
    requests = [command(f"r{i}", "sharedprefix"[: 4 + i], 5, ignore_eos=True, seed=i) for i in range(4)]
    harness.run(*requests)
    for request in requests:
        assert_as_alone(harness, request)
        counts = harness.answer(request.rid).counts
        assert counts.sampled_tokens == counts.completion_tokens == 5
        assert counts.forward_passes == 5 + (len(request.token_ids) - counts.cached_tokens - 1) // 4
    assert harness.scheduler.counters.sampled_tokens == 20


def test_what_is_computed_past_the_end_of_a_request_is_dropped():
    """A request whose end is not foreseen costs one token more, which nobody sees."""
    alone = Harness().run(command("r", "abc", 50, ignore_eos=True))["r"].token_ids
    stop = next(token for token in alone if token != EOS)
    harness = overlapped()
    request = command("r", "abc", 50, ignore_eos=True, stop_token_ids=[stop])
    answer = harness.run(request)["r"]
    assert_as_alone(harness, request)
    ended_after = len(answer.token_ids)
    assert harness.runner.computed == len(request.token_ids) + ended_after
    assert answer.counts.forward_passes == answer.counts.sampled_tokens == ended_after
    assert harness.cached == len(request.token_ids) + ended_after - 1, (
        "the last token was not asked to be computed"
    )


def test_an_end_that_is_foreseen_costs_nothing():
    harness = overlapped()
    request = command("r", "abc", 5, ignore_eos=True)
    harness.run(request)
    assert harness.runner.computed == len(request.token_ids) + 4


@pytest.mark.parametrize(
    "more",
    [
        {"constraint": choices("hello", "help", "hold")},
        {"return_logprob": True},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 3},
    ],
    ids=str,
)
def test_what_a_next_token_depends_on_is_entered_before_the_next_plan(more):
    harness = overlapped()
    requests = [command("r", "abc", 8, seed=1, **more), command("free", "xyz", 8, seed=2)]
    answers = harness.run(*requests)
    plain = Harness()
    expected = plain.run(*requests)
    assert {rid: answer.token_ids for rid, answer in answers.items()} == {
        rid: answer.token_ids for rid, answer in expected.items()
    }
    assert answers["r"].logprobs == expected["r"].logprobs


def test_an_abort_while_its_step_is_computed_frees_its_slots():
    harness = gated(pool=60)
    harness.scheduler.add(
        [command("r", "abc", 20, ignore_eos=True), command("other", "abd", 4, ignore_eos=True)]
    )
    harness.step()
    harness.step()
    harness.scheduler.abort("r")
    harness.scheduler.check()
    harness.runner.gate.set()
    harness.run()
    assert harness.answer("r").finish.type == "abort"
    assert harness.answer("other").finish.type == "length"
    harness.scheduler.flush_cache()
    assert harness.free == 60


def test_a_failed_step_fails_its_requests_and_sends_back_those_planned_after_it():
    harness = gated()
    old, new = command("old", "abc", 6, ignore_eos=True), command("new", "abcdef", 6, ignore_eos=True)
    harness.runner.fail_forward = {2}
    harness.scheduler.add([old])
    harness.step()
    harness.step()  # its second pass waits at the gate and will fail
    harness.scheduler.add([new])
    threading.Timer(0.05, harness.runner.gate.set).start()
    harness.run()
    assert harness.answer("old").finish.type == "error"
    assert "out of memory" in harness.answer("old").finish.message
    assert_as_alone(harness, new)
    assert harness.scheduler.counters.failed_steps == 1


def test_a_full_pool_is_planned_for_when_all_is_known():
    """Nobody gives way, and nobody ends, on account of tokens that are not there yet."""
    harness = overlapped(pool=40, output_share_start=0.02, output_share_floor=0.01)
    requests = [command(f"r{i}", "ab"[i % 2] * 6, 14, ignore_eos=True, seed=i) for i in range(6)]
    harness.run(*requests)
    for request in requests:
        assert_as_alone(harness, request)
    assert harness.scheduler.counters.retractions > 0


def test_steps_do_not_hold_those_before_them():
    harness = overlapped()
    made: list[weakref.ref] = []
    launch = harness.scheduler._launch

    class Noted(list):
        """A list that can be referred to weakly."""

    def noting(plan, device):
        plan.published = Noted(plan.published)
        made.append(weakref.ref(plan.published))
        return launch(plan, device)

    harness.scheduler._launch = noting
    harness.run(command("r", "abc", 40, ignore_eos=True))
    gc.collect()
    assert len(made) == 40
    assert sum(ref() is not None for ref in made) <= 1
    assert not [o for o in gc.get_objects() if isinstance(o, PlannedExtend) and o.follows is not None]
