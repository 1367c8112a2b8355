"""The OpenAI backend against a server that says what the test wants: what is sent, what is made of the answers."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import pytest

from trellis import (
    ConstraintError,
    InvalidRequestError,
    OpenAI,
    ProgramError,
    assistant,
    function,
    gen,
    select,
    system,
    user,
)


def chat_backend(api: Any, **more: Any) -> OpenAI:
    return OpenAI("m", f"{api.url}/v1", "key", "chat", max_retries=0, **more)


def text_backend(api: Any, **more: Any) -> OpenAI:
    return OpenAI("m", f"{api.url}/v1", "key", "completions", max_retries=0, **more)


@function
def ask(s: Any, **options: Any) -> None:
    s += system("Be brief.") + user("Hi") + assistant(gen("x", **options))


@function
def complete(s: Any, **options: Any) -> None:
    s += "Once" + gen("x", **options)


def refusal(program: Any, backend: OpenAI, **options: Any) -> Exception:
    with pytest.raises(ProgramError) as caught:
        program.run(backend=backend, **options)
    assert isinstance(caught.value.__cause__, Exception)
    return caught.value.__cause__


# -- the chat API --------------------------------------------------------------------------------------------------


def test_roles_become_messages_and_only_what_was_asked_for_is_sent(api: Any, answers: Any) -> None:
    api.reply(answers.chat("Hello."))
    state = ask.run(backend=chat_backend(api), max_tokens=9)
    assert state["x"] == "Hello."
    assert api.requests[0].path == "/v1/chat/completions"
    assert api.requests[0].headers["authorization"] == "Bearer key"
    assert api.bodies[0] == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "max_completion_tokens": 9,
    }
    counts = state.meta("x").counts
    assert (counts.prompt_tokens, counts.completion_tokens) == (7, 3)


def test_a_conversation_goes_on_with_what_was_answered(api: Any, answers: Any) -> None:
    api.reply(answers.chat("Hello"), answers.chat("Bye"))

    @function
    def talk(s: Any) -> None:
        s += user("Hi") + assistant(gen("a") + "!")
        s += user("Go") + assistant(gen("b", stop=["x", "y"], temperature=0, seed=4, top_p=0.5))

    talk.run(backend=chat_backend(api))
    assert [m["content"] for m in api.bodies[1]["messages"]] == ["Hi", "Hello!", "Go"]
    sent = {name: api.bodies[1][name] for name in ("stop", "temperature", "seed", "top_p")}
    assert sent == {"stop": ["x", "y"], "temperature": 0.0, "seed": 4, "top_p": 0.5}


@function
def loose(s: Any) -> None:
    s += "Some text." + user("Hi") + assistant(gen("x"))


@function
def no_role(s: Any) -> None:
    s += user("Hi") + gen("x")


@function
def wrong_role(s: Any) -> None:
    s += user("Hi" + gen("x"))


@function
def nothing_before(s: Any) -> None:
    s += assistant(gen("x"))


@function
def prefilled(s: Any) -> None:
    s += user("Hi") + assistant("Sure: " + gen("x"))


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (loose, "put 'Some text.' inside"),
        (no_role, "outside of all roles"),
        (wrong_role, "inside 'user'"),
        (nothing_before, "needs a message before"),
        (prefilled, "cannot go on from text"),
    ],
)
def test_what_a_chat_cannot_do_raises_before_anything_is_sent(api: Any, program: Any, says: str) -> None:
    error = refusal(program, chat_backend(api))
    assert isinstance(error, InvalidRequestError)
    assert says in str(error)
    assert api.requests == []


def test_blanks_between_roles_are_not_loose_text(api: Any, answers: Any) -> None:
    api.reply(answers.chat("ok"))

    @function
    def spaced(s: Any) -> None:
        s += user("Hi") + "\n\n" + assistant(gen("x"))

    assert spaced.run(backend=chat_backend(api))["x"] == "ok"


def test_a_server_that_continues_messages_gets_the_beginning(api: Any, answers: Any) -> None:
    api.reply(answers.chat("yes"))
    assert prefilled.run(backend=chat_backend(api, dialect="vllm"))["x"] == "yes"
    body = api.bodies[0]
    assert body["messages"][-1] == {"role": "assistant", "content": "Sure: "}
    assert (body["add_generation_prompt"], body["continue_final_message"]) == (False, True)


SAMPLING: list[dict[str, Any]] = [
    {"top_k": 5},
    {"min_p": 0.1},
    {"repetition_penalty": 1.2},
    {"min_tokens": 2},
    {"stop_token_ids": [3]},
    {"ignore_eos": True},
    {"stop_regex": "a+"},
]


@pytest.mark.parametrize("options", SAMPLING, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("make", [chat_backend, text_backend])
def test_what_the_api_has_no_field_for_raises(api: Any, make: Any, options: dict[str, Any]) -> None:
    program = ask if make is chat_backend else complete
    error = refusal(program.bind(**options), make(api))
    assert isinstance(error, InvalidRequestError)
    assert error.field == next(iter(options))
    assert api.requests == []


@pytest.mark.parametrize("options", SAMPLING[:-1], ids=lambda options: next(iter(options)))
def test_other_servers_have_a_field_for_it(api: Any, answers: Any, options: dict[str, Any]) -> None:
    api.reply(answers.completion(" x"))
    complete.bind(**options).run(backend=text_backend(api, dialect="vllm"))
    [(name, value)] = options.items()
    assert api.bodies[0][name] == value


def test_a_key_of_openai_goes_to_no_other_server(
    api: Any, answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    api.reply(answers.chat("ok"))
    for dialect in ("openai", "vllm"):
        backend = OpenAI("m", f"{api.url}/v1", api="chat", dialect=dialect)
        ask.run(backend=backend)
    keys = [request.headers["authorization"] for request in api.requests]
    assert keys == ["Bearer secret", "Bearer none"]


# -- constraints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"regex": "a+"}, {"grammar": 'start: "a"'}])
@pytest.mark.parametrize("make", [chat_backend, text_backend])
def test_a_constraint_that_is_not_enforced_raises(api: Any, make: Any, options: dict[str, Any]) -> None:
    error = refusal((ask if make is chat_backend else complete).bind(**options), make(api))
    assert isinstance(error, ConstraintError)
    assert error.code == "unsupported"
    assert error.kind == next(iter(options))
    assert api.requests == []


def test_the_completions_api_has_no_structured_outputs(api: Any) -> None:
    error = refusal(complete.bind(choices=["a", "b"]), text_backend(api))
    assert isinstance(error, ConstraintError)
    assert "dialect" in str(error)


OBJECT = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


def test_an_object_goes_out_as_it_is(api: Any, answers: Any) -> None:
    api.reply(answers.chat('{"n": 3}'))
    state = ask.bind(schema=OBJECT).run(backend=chat_backend(api))
    assert state["x"] == {"n": 3}
    form = api.bodies[0]["response_format"]
    assert form == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": OBJECT, "strict": True},
    }
    assert state.meta("x").validated_only == ()


def test_strict_false_says_that_nothing_is_enforced(api: Any, answers: Any) -> None:
    api.reply(answers.chat('{"n": 3}'))
    state = ask.bind(schema=OBJECT, strict=False).run(backend=chat_backend(api))
    assert api.bodies[0]["response_format"]["json_schema"]["strict"] is False
    assert state.meta("x").validated_only != ()


@pytest.mark.parametrize(
    ("options", "answer", "value", "text"),
    [
        ({"choices": ["red", 'b"e']}, '{"value": "b\\"e"}', 'b"e', 'b"e'),
        ({"schema": list[int]}, '{"value":[1, 2]}', [1, 2], "[1, 2]"),
        ({"schema": Literal["a", "b"]}, ' { "value" : "a" } ', "a", '"a"'),
        ({"schema": str | None}, '{"value": null}', None, "null"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_object_is_wrapped_in_one_and_taken_out_again(
    api: Any, answers: Any, options: dict[str, Any], answer: str, value: Any, text: str, stream: bool
) -> None:
    api.reply(answers.events(answers.chat_chunks(*answer)) if stream else answers.chat(answer))
    state = ask.bind(**options).run(backend=chat_backend(api), stream=stream)
    assert "".join(state.text_iter("x")) == text
    assert state["x"] == value
    schema = api.bodies[0]["response_format"]["json_schema"]["schema"]
    assert (schema["type"], schema["required"]) == ("object", ["value"])


def test_definitions_stay_at_the_root(api: Any, answers: Any) -> None:
    api.reply(answers.chat('{"value": 1}'))
    schema = {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}
    assert ask.bind(schema=schema).run(backend=chat_backend(api))["x"] == 1
    sent = api.bodies[0]["response_format"]["json_schema"]["schema"]
    assert sent["$defs"] == {"n": {"type": "integer"}}
    assert sent["properties"]["value"] == {"$ref": "#/$defs/n"}


@pytest.mark.parametrize(
    "options",
    [
        {"schema": True},
        {"schema": {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]}},
        {"schema": OBJECT, "json_spacing": "compact"},
    ],
)
def test_schemas_that_structured_outputs_cannot_say_raise(api: Any, options: dict[str, Any]) -> None:
    error = refusal(ask.bind(**options), chat_backend(api))
    assert isinstance(error, ConstraintError)
    assert api.requests == []


def test_an_answer_that_is_none_of_the_choices_is_an_error(api: Any, answers: Any) -> None:
    api.reply(answers.chat('{"value": "green"}'))
    assert "none of the choices" in str(refusal(ask.bind(choices=["red", "blue"]), chat_backend(api)))


def test_a_wrapped_value_that_was_cut_is_shown_as_far_as_it_came(api: Any, answers: Any) -> None:
    api.reply(answers.chat('{"value": [1, 2', finish="length"))
    state = ask.bind(schema=list[int]).run(backend=chat_backend(api))
    assert state.text("x") == "[1, 2"
    with pytest.raises(ProgramError, match="cut at max_tokens"):
        state["x"]


@pytest.mark.parametrize(
    ("dialect", "options", "sent"),
    [
        ("vllm", {"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ("vllm", {"choices": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ("vllm", {"schema": OBJECT}, {"structured_outputs": {"json": OBJECT}}),
        ("trellis", {"regex": "a+"}, {"regex": "a+"}),
        ("trellis", {"choices": ["a", "b"]}, {"choices": ["a", "b"]}),
        ("trellis", {"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        (
            "trellis",
            {"schema": OBJECT, "json_spacing": "any", "strict": False},
            {"json_schema": json.dumps(OBJECT), "json_spacing": "any", "strict": False},
        ),
    ],
)
def test_other_servers_get_constraints_as_they_know_them(
    api: Any, answers: Any, dialect: str, options: dict[str, Any], sent: dict[str, Any]
) -> None:
    api.reply(answers.chat("a"))
    ask.bind(**options).run(backend=chat_backend(api, dialect=dialect))
    assert {name: api.bodies[0][name] for name in sent} == sent


def test_vllm_refuses_what_only_trellis_has(api: Any) -> None:
    program = ask.bind(schema=OBJECT, json_spacing="compact")
    assert isinstance(refusal(program, chat_backend(api, dialect="vllm")), ConstraintError)


# -- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [chat_backend, text_backend])
def test_a_stream_comes_piece_by_piece_with_its_usage(api: Any, answers: Any, make: Any) -> None:
    chunks = answers.chat_chunks("Hel", "lo", finish="length")
    if make is text_backend:
        for chunk in chunks:
            for choice in chunk["choices"]:
                choice.update(text=choice.pop("delta").get("content", ""), logprobs=None)
    api.reply(answers.events(chunks))
    state = (ask if make is chat_backend else complete).run(backend=make(api), stream=True)
    assert [piece for piece in state.text_iter("x") if piece] == ["Hel", "lo"]
    assert state.meta("x").finish_reason == "length"
    assert state.meta("x").counts.completion_tokens == 3
    assert api.bodies[0]["stream_options"] == {"include_usage": True}


def test_several_samples_are_one_request(api: Any, answers: Any) -> None:
    api.reply(answers.chat("a", "b", "c"))
    state = ask.bind(n=3).run(backend=chat_backend(api))
    assert state["x"] == ["a", "b", "c"]
    assert [body["n"] for body in api.bodies] == [3]
    assert sum(meta.counts.completion_tokens for meta in state.meta("x")) == 3


def test_logprobs_of_a_chat(api: Any, answers: Any) -> None:
    content = [
        {"token": "Hi", "logprob": -0.5, "bytes": None, "top_logprobs": []},
        {"token": "!", "logprob": None, "bytes": None, "top_logprobs": []},
    ]
    api.reply(answers.chat("Hi!", logprobs={"content": content}))
    meta = ask.run(backend=chat_backend(api), return_logprob=True).meta("x")
    assert meta.logprobs == (-0.5, -math.inf)
    assert api.bodies[0]["logprobs"] is True


def test_logprobs_by_token_id(api: Any, answers: Any) -> None:
    tokens = {
        "tokens": ["token_id:5"],
        "token_logprobs": [-1.0],
        "top_logprobs": [{"token_id:5": -1.0, "token_id:9": -2.0}],
        "text_offset": [0],
    }
    api.reply(answers.completion(" x", logprobs=[tokens]))
    meta = complete.run(backend=text_backend(api, dialect="vllm"), top_logprobs_num=2).meta("x")
    assert (meta.token_ids, meta.logprobs) == ((5,), (-1.0,))
    assert meta.top_logprobs == (((5, -1.0), (9, -2.0)),)
    assert (api.bodies[0]["logprobs"], api.bodies[0]["return_tokens_as_token_ids"]) == (2, True)


def test_alternatives_without_ids_are_refused(api: Any) -> None:
    error = refusal(ask, chat_backend(api), top_logprobs_num=2)
    assert isinstance(error, InvalidRequestError)
    assert error.field == "top_logprobs_num"


@pytest.mark.parametrize("dialect", ["openai", "vllm"])
def test_logprobs_that_do_not_come_are_an_error(api: Any, answers: Any, dialect: str) -> None:
    api.reply(answers.completion(" x"))
    error = refusal(complete, text_backend(api, dialect=dialect), return_logprob=True)
    assert "no log-probabilities" in str(error)


# -- select --------------------------------------------------------------------------------------------------------


@function
def pick(s: Any, **options: Any) -> None:
    s += user("Colour?") + assistant(select("c", ["red", "green"], **options))


def test_on_a_chat_the_model_chooses(api: Any, answers: Any) -> None:
    api.reply(answers.chat('{"value": "green"}'))
    state = pick.run(backend=chat_backend(api))
    assert state["c"] == "green"
    assert (state.meta("c").method, state.meta("c").probabilities) == ("chosen", ())
    body = api.bodies[0]
    enum = body["response_format"]["json_schema"]["schema"]["properties"]["value"]["enum"]
    assert (enum, body["temperature"]) == (["red", "green"], 0.0)
    assert body["max_completion_tokens"] >= len("green")


@pytest.mark.parametrize("method", ["sum", "greedy"])
def test_methods_that_need_scores_raise_on_a_chat(api: Any, method: str) -> None:
    error = refusal(pick.bind(method=method), chat_backend(api))
    assert isinstance(error, InvalidRequestError)
    assert error.field == "select.method"
    assert api.requests == []


def test_a_chat_without_constraints_cannot_select(api: Any, answers: Any) -> None:
    api.reply(answers.chat("red or green", finish="stop"))
    assert "none of the choices" in str(refusal(pick, chat_backend(api)))


def echoed(*tokens: str) -> dict[str, Any]:
    """Log-probabilities of an echoed text: the first token has none, any other minus its length."""
    values = [None, *(-float(len(token)) for token in tokens[1:])]
    return {"tokens": list(tokens), "token_logprobs": values, "top_logprobs": None, "text_offset": None}


@function
def vote(s: Any, **options: Any) -> None:
    s += "The colour is" + select("c", [" red", "s"], **options)


def test_options_are_scored_from_where_all_tokenisations_agree(api: Any, answers: Any) -> None:
    texts = ["The colour is", "The colour is red", "The colour iss"]
    tokens = [
        echoed("The", " colour", " is"),
        echoed("The", " colour", " is", " red"),
        echoed("The", " colour", " iss"),
    ]
    api.reply(answers.completion(*texts, finish="length", logprobs=tokens))
    state = vote.run(backend=text_backend(api))
    assert state.meta("c").option_logprobs == ((-3.0, -4.0), (-4.0,))
    assert state["c"] == " red"  # a mean of -3.5 against -4
    body = api.bodies[0]
    assert (body["prompt"], body["echo"], body["max_tokens"]) == (texts, True, 0)


def test_options_that_reach_into_the_first_token_are_an_error(api: Any, answers: Any) -> None:
    tokens = [echoed("The colour is"), echoed("The colour is red"), echoed("The colour iss")]
    api.reply(answers.completion("", "", "", logprobs=tokens))
    assert "first token" in str(refusal(vote, text_backend(api)))


def test_a_server_that_does_not_echo_cannot_score(api: Any, answers: Any) -> None:
    api.reply(answers.completion("", "", ""))
    assert "echo" in str(refusal(vote, text_backend(api)))


def test_select_needs_a_prompt(api: Any) -> None:
    @function
    def empty(s: Any) -> None:
        s += select("c", ["a", "b"])

    error = refusal(empty, text_backend(api))
    assert isinstance(error, InvalidRequestError)
    assert error.field == "prompt"
    assert api.requests == []


# -- the constructor -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "messages"),
    [
        ("gpt-4.1", True),
        ("gpt-3.5-turbo-instruct", False),
        ("davinci-002", False),
        ("ft:babbage-002:x", False),
    ],
)
def test_auto_takes_the_api_that_the_model_has(model: str, messages: bool) -> None:
    assert OpenAI(model, api_key="k").speaks_messages is messages


@pytest.mark.parametrize("options", [{"api": "responses"}, {"dialect": "vlm"}])
def test_unknown_names_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        OpenAI("m", api_key="k", **options)


def test_statistics_add_up(api: Any, answers: Any) -> None:
    api.reply(answers.chat("x"))
    backend = chat_backend(api)
    ask.run_batch([{}] * 3, backend=backend)
    stats = backend.stats()
    assert (stats.calls, stats.prompt_tokens, stats.completion_tokens) == (3, 21, 9)
    assert (stats.saved_calls, stats.saved_prompt_tokens) == (0, 0)
