"""The last look at a constrained text: what becomes of one that breaks its constraint."""

from __future__ import annotations

import pytest
from scheduler_fakes import Harness, choices, command

from trellis.runtime.messages import GrammarReport


def test_a_text_that_breaks_an_enforced_constraint_is_a_counted_error() -> None:
    harness = Harness()
    answers = harness.run(
        command("bad", "ab", constraint=choices("xyz", kind="strict")),
        command("good", "ab", constraint=choices("abc", kind="strict")),
        command("free", "ab", max_new_tokens=3),
    )
    finish = answers["bad"].finish
    assert (finish.type, finish.status) == ("error", 500)
    assert "it holds an x" in finish.message
    assert answers["bad"].text == "xyz"
    assert answers["good"].finish.type == "stop"
    counters = harness.scheduler.counters
    assert (counters.constraint_misses, counters.errors) == (1, 1)
    assert harness.scheduler.stats()["constraint_misses"] == 1
    reports = {rid: answer.outputs[-1].grammar for rid, answer in answers.items()}
    assert reports == {"bad": GrammarReport("fake"), "good": GrammarReport("fake"), "free": None}


def test_what_is_only_validated_is_a_warning() -> None:
    harness = Harness()
    answers = harness.run(
        command("bad", "ab", constraint=choices("xyz", kind="loose")),
        command("good", "ab", constraint=choices("abc", kind="loose")),
    )
    assert [answers[rid].finish.type for rid in ("bad", "good")] == ["stop", "stop"]
    bad, good = (answers[rid].outputs[-1].grammar for rid in ("bad", "good"))
    assert good == GrammarReport("fake", [], ["no x"])
    assert bad.validated_only == ["no x"]
    assert bad.warnings == ["the text does not satisfy the constraint: it holds an x"]
    assert harness.scheduler.counters.constraint_misses == 0


@pytest.mark.parametrize("more", [{"max_new_tokens": 2}, {"stop": ["y"]}, {"stop_token_ids": [25]}])
def test_cut_texts_are_not_looked_at(more: dict) -> None:
    harness = Harness()
    [answer] = harness.run(command("cut", "ab", constraint=choices("xyz", kind="strict"), **more)).values()
    assert answer.finish.type in ("stop", "length")
    assert harness.scheduler.counters.constraint_misses == 0


def test_a_check_that_fails_is_a_miss_and_ends_nothing_else() -> None:
    harness = Harness()
    answers = harness.run(
        command("bad", "ab", constraint=choices("abc", kind="fragile")),
        command("free", "ab", max_new_tokens=3),
    )
    assert answers["bad"].finish.type == "error"
    assert "RuntimeError" in answers["bad"].finish.message
    assert answers["free"].finish.type == "length"
    assert harness.scheduler.counters.constraint_misses == 1


def test_the_report_comes_once_with_the_last_output() -> None:
    harness = Harness()
    [answer] = harness.run(
        command("r", "ab", constraint=choices("abcdefg"), jump_forward=False, max_new_tokens=20)
    ).values()
    assert len(answer.outputs) > 1
    assert [output.grammar is not None for output in answer.outputs] == [False] * (
        len(answer.outputs) - 1
    ) + [True]


def test_an_aborted_request_is_reported_too() -> None:
    harness = Harness()
    harness.scheduler.add([command("r", "ab", constraint=choices("abcdefg"), jump_forward=False)])
    harness.step()
    harness.scheduler.abort("r")
    harness.step()
    assert harness.outputs["r"][-1].grammar == GrammarReport("fake")


def test_a_stop_pattern_that_costs_too_much_in_the_text_is_the_clients_mistake() -> None:
    harness = Harness()
    answers = harness.run(
        command(
            "costly", "ab", max_new_tokens=400, stop_regex=[r"(.|\n){1,999}ZZZ", "Y{99}"], ignore_eos=True
        ),
        command("other", "ab", max_new_tokens=3),
    )
    finish = answers["costly"].finish
    assert (finish.type, finish.status, finish.code) == ("error", 400, "limit")
    assert finish.message.startswith("stop_regex: ")
    assert answers["other"].finish.type in ("length", "stop")
    assert harness.free + harness.cached == harness.scheduler.stats()["pool_tokens"]
