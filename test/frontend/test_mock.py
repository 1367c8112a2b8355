"""The backend for tests must itself be honest."""

from __future__ import annotations

import asyncio

import pytest

from trellis.errors import BackendError, ProgramError
from trellis.frontend import MockAnswer, MockBackend, function, gen, select


def one(backend, **options):
    @function
    def program(s):
        s += "a prompt" + gen("x", **options)

    return program.run(backend=backend)


def test_answers_may_be_one_a_list_or_a_function() -> None:
    assert one(MockBackend("same"))["x"] == "same"
    backend = MockBackend(["first", "second"])
    assert [one(backend)["x"], one(backend)["x"]] == ["first", "second"]
    with pytest.raises(ProgramError, match="this is gen number 3, but the mock has only 2 answers"):
        one(backend)
    assert one(MockBackend(lambda r: r.prompt[0].upper()))["x"] == "A PROMPT"

    async def later(_request):
        await asyncio.sleep(0)
        return "async"

    assert one(MockBackend(later))["x"] == "async"


def test_without_answers() -> None:
    assert one(MockBackend())["x"] == "mock"
    assert one(MockBackend(), choices=["b", "a"])["x"] == "b"
    with pytest.raises(ProgramError, match="give it answers"):
        one(MockBackend(), regex="a+")


def test_an_answer_that_breaks_the_constraint_is_an_error() -> None:
    assert one(MockBackend("aa"), regex="a+")["x"] == "aa"
    for constraint in ({"regex": "a+"}, {"choices": ["a", "c"]}):
        with pytest.raises(ProgramError, match="'b' breaks the") as caught:
            one(MockBackend("b"), **constraint)
        assert isinstance(caught.value.__cause__, BackendError)


def test_the_first_stop_string_cuts() -> None:
    state = one(MockBackend("a b; c. d"), stop=[".", ";"])
    assert (state["x"], state.meta("x").matched) == ("a b", ";")


def test_the_maximum_cuts_words() -> None:
    state = one(MockBackend("a b c d"), max_tokens=2)
    assert (state["x"], state.meta("x").finish_reason) == ("a b", "length")


def test_an_error_may_come_after_some_text() -> None:
    with pytest.raises(ProgramError, match="bad"):
        one(MockBackend(MockAnswer("some text", error=ValueError("bad"))))


def test_what_is_no_answer_is_refused() -> None:
    with pytest.raises(ProgramError, match="must be a string"):
        one(MockBackend(lambda _r: 5))  # type: ignore[arg-type,return-value]


def test_scores_by_text_and_by_function() -> None:
    @function
    def program(s):
        s += "which? " + select("x", ["a", "b"])

    assert program.run(backend=MockBackend())["x"] == "a"
    assert program.run(backend=MockBackend(scores={"a": -2, "b": -1}))["x"] == "b"
    seen = []

    def scores(prompt, options):
        seen.append((prompt, tuple(options)))
        return [[-3.0], [-1.0, -1.0]]

    assert program.run(backend=MockBackend(scores=scores))["x"] == "b"
    assert seen == [("which? ", ("a", "b"))]
