"""The Anthropic backend against a server that says what the test wants."""

from __future__ import annotations

from typing import Any

import pytest

from trellis import (
    Anthropic,
    ConstraintError,
    InvalidRequestError,
    ProgramError,
    assistant,
    function,
    gen,
    select,
    system,
    user,
)


def backend_of(api: Any) -> Anthropic:
    return Anthropic("m", api.url, "key", max_retries=0)


def message(
    *texts: str, reason: str = "end_turn", matched: str | None = None, **usage: int
) -> dict[str, Any]:
    return {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": text} for text in texts],
        "stop_reason": reason,
        "stop_sequence": matched,
        "usage": {"input_tokens": 5, "output_tokens": 2, **usage},
    }


def streamed(*texts: str, reason: str = "end_turn") -> list[dict[str, Any]]:
    start = {**message(reason=""), "stop_reason": None, "usage": {"input_tokens": 5, "output_tokens": 1}}
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        for text in texts
    ]
    end = {"stop_reason": reason, "stop_sequence": None}
    return [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *deltas,
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": end, "usage": {"output_tokens": 4}},
        {"type": "message_stop"},
    ]


@function
def ask(s: Any, **options: Any) -> None:
    s += system("Be brief.") + user("Hi") + assistant(gen("x", **options))


def refusal(program: Any, api: Any, **options: Any) -> Exception:
    with pytest.raises(ProgramError) as caught:
        program.run(backend=backend_of(api), **options)
    assert isinstance(caught.value.__cause__, Exception)
    return caught.value.__cause__


def test_the_system_message_goes_apart(api: Any) -> None:
    api.reply(message("Hel", "lo", cache_read_input_tokens=3, cache_creation_input_tokens=2))
    program = ask.bind(max_tokens=9, stop="x", temperature=0.5, top_k=3)
    state = program.run(backend=backend_of(api))
    assert state["x"] == "Hello"
    assert api.requests[0].path == "/v1/messages"
    assert api.bodies[0] == {
        "model": "m",
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 9,
        "stop_sequences": ["x"],
        "temperature": 0.5,
        "top_k": 3,
    }
    counts = state.meta("x").counts
    assert (counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens) == (10, 3, 2)


def test_a_stream_comes_piece_by_piece(api: Any, answers: Any) -> None:
    api.reply(answers.named_events(streamed("Hel", "lo", reason="max_tokens")))
    state = ask.run(backend=backend_of(api), stream=True)
    assert list(state.text_iter("x")) == ["Hel", "lo"]
    meta = state.meta("x")
    assert (meta.finish_reason, meta.counts.prompt_tokens, meta.counts.completion_tokens) == ("length", 5, 4)


def test_the_stop_that_ended_the_text_is_named(api: Any) -> None:
    api.reply(message("Hi", reason="stop_sequence", matched="x"))
    assert ask.bind(stop=["x", "y"]).run(backend=backend_of(api)).meta("x").matched == "x"


def test_text_before_the_gen_is_continued(api: Any) -> None:
    api.reply(message(" 4."))

    @function
    def prefilled(s: Any) -> None:
        s += user("2 + 2?") + assistant("It is" + gen("x"))

    state = prefilled.run(backend=backend_of(api))
    assert api.bodies[0]["messages"][-1] == {"role": "assistant", "content": "It is"}
    assert state.messages()[-1]["content"] == "It is 4."


@function
def late_system(s: Any) -> None:
    s += user("Hi") + system("Be brief.") + assistant(gen("x"))


@function
def blank_before(s: Any) -> None:
    s += user("Hi") + assistant("It is " + gen("x"))


@function
def twice(s: Any) -> None:
    s += user("Hi") + assistant("Hello.") + assistant(gen("x"))


@function
def only_system(s: Any) -> None:
    s += system("Hi") + assistant(gen("x"))


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (late_system, "before all others"),
        (blank_before, "after blanks"),
        (twice, "answers a user message"),
        (only_system, "answers a user message"),
    ],
)
def test_what_the_api_cannot_do_raises_before_anything_is_sent(api: Any, program: Any, says: str) -> None:
    error = refusal(program, api)
    assert isinstance(error, InvalidRequestError)
    assert error.field == "role"
    assert says in str(error)
    assert api.requests == []


@pytest.mark.parametrize(
    "options",
    [{"seed": 1}, {"min_p": 0.1}, {"frequency_penalty": 1.0}, {"return_logprob": True}, {"min_tokens": 1}],
    ids=lambda options: next(iter(options)),
)
def test_parameters_that_it_has_not_raise(api: Any, options: dict[str, Any]) -> None:
    error = refusal(ask.bind(**options), api)
    assert isinstance(error, InvalidRequestError)
    assert error.field == next(iter(options))
    assert api.requests == []


def test_schemas_are_structured_outputs(api: Any) -> None:
    api.reply(message('{"value": [1, 2]}'))
    assert ask.bind(schema=list[int]).run(backend=backend_of(api))["x"] == [1, 2]
    form = api.bodies[0]["output_config"]["format"]
    assert form["type"] == "json_schema"
    assert form["schema"]["properties"] == {"value": {"items": {"type": "integer"}, "type": "array"}}


@pytest.mark.parametrize("options", [{"regex": "a+"}, {"grammar": 'start: "a"'}])
def test_what_it_cannot_enforce_raises(api: Any, options: dict[str, Any]) -> None:
    assert isinstance(refusal(ask.bind(**options), api), ConstraintError)
    assert api.requests == []


def test_select_lets_the_model_choose(api: Any) -> None:
    api.reply(message('{"value": "no"}'))

    @function
    def decide(s: Any) -> None:
        s += user("Well?") + assistant(select("d", ["yes", "no"]))

    assert decide.run(backend=backend_of(api))["d"] == "no"
    assert api.bodies[0]["output_config"]["format"]["schema"]["properties"]["value"]["enum"] == ["yes", "no"]


@pytest.mark.parametrize(("reason", "says"), [("refusal", "refused"), ("tool_use", "'tool_use'")])
def test_answers_that_are_no_texts(api: Any, reason: str, says: str) -> None:
    api.reply(message("part", reason=reason))
    assert says in str(refusal(ask, api))


def test_a_stream_that_ends_early(api: Any, answers: Any) -> None:
    api.reply(answers.named_events(streamed("Hel")[:3]))
    state = ask.run(backend=backend_of(api), stream=True)
    with pytest.raises(ProgramError, match="before it was complete"):
        list(state.text_iter("x"))


def test_an_error_in_the_middle_of_a_stream(api: Any, answers: Any) -> None:
    broken = {"type": "error", "error": {"type": "overloaded_error", "message": "too much"}}
    api.reply(answers.named_events([*streamed("Hel")[:3], broken]))
    state = ask.run(backend=backend_of(api), stream=True)
    with pytest.raises(ProgramError, match="too much"):
        list(state.text_iter("x"))
