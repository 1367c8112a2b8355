"""Drafts: computed in case they come, chosen by the sampler or not at all."""

from __future__ import annotations

import pytest
from scheduler_fakes import Harness, assert_as_alone, choices, command

TWENTY = [f"{a}{b}" for a in "abcd" for b in ("abcde", "abcxy", "xyzab", "xyzba", "q")]


def test_drafts_that_come_save_forward_passes_and_change_nothing():
    drafting, plain = Harness(pool=2000), Harness(pool=2000)

    def requests(jump_forward: bool):
        return [
            command(
                f"r{i}",
                "hello",
                max_new_tokens=20,
                constraint=choices(*TWENTY),
                temperature=1.0,
                seed=i,
                jump_forward=jump_forward,
            )
            for i in range(30)
        ]

    with_drafts, without = drafting.run(*requests(True)), plain.run(*requests(False))
    assert {rid: answer.token_ids for rid, answer in with_drafts.items()} == {
        rid: answer.token_ids for rid, answer in without.items()
    }
    counts = [answer.outputs[-1].counts for answer in with_drafts.values()]
    assert sum(c.forward_passes for c in counts) < sum(c.sampled_tokens for c in counts)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_answers_are_those_of_a_request_alone_whether_or_not_drafts_come(seed: int, penalty: float):
    harness = Harness()
    requests = [
        command(
            f"r{i}",
            "abc" * (i + 1),
            max_new_tokens=3 + i,
            constraint=choices(*TWENTY),
            temperature=1.0,
            seed=100 * seed + i,
            frequency_penalty=penalty,
        )
        for i in range(4)
    ]
    harness.run(*requests)
    if not penalty:  # the reference knows no penalties
        for request in requests:
            assert_as_alone(harness, request)
    assert harness.free + harness.cached == harness.config.max_total_tokens
    drafted, accepted = (
        harness.scheduler.counters.drafted_tokens,
        harness.scheduler.counters.accepted_draft_tokens,
    )
    assert 0 <= accepted <= drafted


def test_some_drafts_come_and_some_do_not():
    harness = Harness()
    harness.run(
        *(
            command(f"r{i}", "ab", max_new_tokens=20, constraint=choices(*TWENTY), temperature=1.0, seed=i)
            for i in range(20)
        )
    )
    counters = harness.scheduler.counters
    assert 0 < counters.accepted_draft_tokens < counters.drafted_tokens


def test_with_logprobs_nothing_is_drafted_and_the_text_is_the_same():
    texts = {}
    for logprobs in (False, True):
        harness = Harness()
        harness.run(
            command(
                "r",
                "ab",
                max_new_tokens=20,
                constraint=choices(*TWENTY),
                temperature=1.0,
                seed=3,
                return_logprob=logprobs,
            )
        )
        texts[logprobs] = harness.answer("r").token_ids
        assert (harness.scheduler.counters.drafted_tokens == 0) == logprobs
    assert texts[False] == texts[True]


def test_a_draft_takes_no_slot_that_somebody_would_have_to_give_up():
    """A pool that holds the two requests and not one slot more: they run as without drafts."""
    harness = Harness(pool=16)
    requests = [
        command(
            f"r{i}", "abcd"[i] * 2, max_new_tokens=6, constraint=choices(*TWENTY), temperature=1.0, seed=i
        )
        for i in range(2)
    ]
    harness.run(*requests)
    for request in requests:
        assert_as_alone(harness, request)
    assert harness.scheduler.counters.retractions == 0
