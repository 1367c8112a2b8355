"""The OpenAI-compatible routes over a runtime that echoes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

Call = Callable[..., httpx.Response]
CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
RENDERED = "user:hi\nassistant:"


SCHEMA_FIELD = "response_format.json_schema.schema"


def json_schema(**inner: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": inner}


def post(call: Call, path: str, body: Any, status: int = 200) -> Any:
    response = call("POST", f"/v1/{path}", body)
    assert response.status_code == status, response.text
    return response.json()


def chunks(call: Call, path: str, body: Any) -> list[Any]:
    response = call("POST", f"/v1/{path}", {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_models(call: Call) -> None:
    [model] = call("GET", "/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("echo", "model", 200)
    assert call("GET", "/v1/models/echo").json() == model
    missing = call("GET", "/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("ab", ["ab"]), (["ab", "cd"], ["ab", "cd"]), ([97, 98], ["ab"]), ([[97], [98]], ["a", "b"])],
)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_completion_matrix(
    call: Call, prompt: Any, prompts: list[str], n: int, echo: bool, logprobs: int | None, stream: bool
) -> None:
    body = {"model": "echo", "prompt": prompt, "max_tokens": 3, "n": n, "echo": echo, "logprobs": logprobs}
    wanted = [p * echo + (p * 3)[:3] for p in prompts for _ in range(n)]
    if stream:
        parts = chunks(call, "completions", {**body, "stream_options": {"include_usage": True}})
        usage = parts.pop()["usage"]
        choices = [choice for part in parts for choice in part["choices"]]
    else:
        answer = post(call, "completions", body)
        usage, choices = answer["usage"], answer["choices"]
        assert answer["object"] == "text_completion"
        assert [choice["index"] for choice in choices] == list(range(len(wanted)))
    got = ["".join(c["text"] for c in choices if c["index"] == i) for i in range(len(wanted))]
    assert got == wanted
    assert Counter(c["index"] for c in choices if c["finish_reason"]) == Counter(range(len(wanted)))
    total = sum(map(len, prompts))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (total, 3 * len(wanted))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    for i, text in enumerate(wanted):
        check_logprobs([c["logprobs"] for c in choices if c["index"] == i], text, logprobs, echo)


def check_logprobs(parts: list[Any], text: str, top: int | None, echo: bool) -> None:
    found = [part for part in parts if part is not None]
    if top is None:
        assert found == []
        return
    joined = {name: [x for part in found for x in part[name]] for name in found[0]}
    assert "".join(joined["tokens"]) == text
    assert joined["text_offset"] == list(range(len(text)))
    values = joined["token_logprobs"]
    assert (values[0] is None) == echo
    assert values[1:] == [-ord(c) / 100 for c in text[1:]]
    new = joined["top_logprobs"][-3:]
    assert new == ([{c: -ord(c) / 100} for c in text[-3:]] if top else [None] * 3)


@pytest.mark.parametrize("echo", [False, True])
def test_text_offsets_point_into_the_text(call: Call, echo: bool) -> None:
    body = {"prompt": "aé€b", "max_tokens": 7, "logprobs": 0, "echo": echo}
    answer = post(call, "completions", body)["choices"][0]
    one_text = [0, 1, 1, 2, 2, 2, 3]  # a character of n bytes is n tokens here
    wanted = one_text + [4 + at for at in one_text] if echo else one_text
    assert answer["text"] == "aé€b" * (2 if echo else 1)
    assert answer["logprobs"]["text_offset"] == wanted
    parts = [part["choices"][0]["logprobs"] for part in chunks(call, "completions", body)]
    assert [at for part in parts if part for at in part["text_offset"]] == wanted


@pytest.mark.parametrize("skip", [False, True])
def test_text_offsets_count_special_tokens_only_where_they_are_shown(call: Call, skip: bool) -> None:
    body = {"prompt": [97, 256, 98], "max_tokens": 3, "logprobs": 0, "skip_special_tokens": skip}
    answer = post(call, "completions", body)["choices"][0]
    assert answer["text"] == ("ab" if skip else "a<eos>b")
    assert answer["logprobs"]["text_offset"] == ([0, 1, 1] if skip else [0, 1, 6])


def test_text_offsets_leave_out_a_bos_token_that_the_prompt_does_not_show(call: Call, engine: Any) -> None:
    engine.tokenizer.bos_token_id = 256
    engine.tokenizer.encode = lambda text, add_special_tokens=True: (
        [256] * (add_special_tokens and not text.startswith("<eos>")) + list(text.encode())
    )
    body = {"prompt": "ab", "max_tokens": 3, "logprobs": 0, "echo": True}
    answer = post(call, "completions", body)["choices"][0]
    assert answer["logprobs"]["text_offset"] == [0, 0, 1, 2, 2, 3]
    shown = post(call, "completions", {**body, "prompt": [256, 97], "max_tokens": 2})["choices"][0]
    assert shown["text"] == "<eos>aa"
    assert shown["logprobs"]["text_offset"] == [0, 5, 6, 6]


def test_completion_defaults(call: Call, scheduler: Any) -> None:
    answer = post(call, "completions", {"prompt": "a"})
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["model"] == "echo"
    assert answer["id"].startswith("cmpl-")
    assert scheduler.commands[0].params.temperature == 1.0


def test_echo_without_new_tokens_scores_a_prompt(call: Call) -> None:
    answer = post(call, "completions", {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0})
    [choice] = answer["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.98, -0.99]


def test_stop_is_reported(call: Call) -> None:
    [choice] = post(call, "completions", {"prompt": "abcdef", "stop": "d"})["choices"]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("abc", "stop", "d")


def test_all_sampling_fields_arrive(call: Call, scheduler: Any) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"97": 1},
        "stop": ["x", "y"],
        "stop_token_ids": [5],
        "seed": 11,
        "regex": "a+",
        "cache_salt": "tenant",
        "user": "somebody",
        "skip_special_tokens": False,
    }
    post(call, "completions", body)
    command = scheduler.commands[0]
    params = command.params
    assert (params.max_new_tokens, params.min_new_tokens, params.temperature) == (5, 2, 0.5)
    assert (params.top_p, params.top_k, params.min_p, params.ignore_eos) == (0.9, 7, 0.1, True)
    assert (params.frequency_penalty, params.presence_penalty) == (0.3, -0.3)
    assert (params.repetition_penalty, params.logit_bias, params.seed) == (1.1, {97: 1.0}, 11)
    assert (params.stop, params.stop_token_ids, params.skip_special_tokens) == (["x", "y"], [5], False)
    assert (command.constraint.kind, command.constraint.source) == ("regex", "a+")
    assert command.namespace == "tenant"


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "source", "strict"),
    [
        ({"response_format": {"type": "json_object"}}, {"type": "object"}, True),
        ({"response_format": json_schema(name="n", schema={"type": "null"})}, {"type": "null"}, True),
        ({"response_format": json_schema(schema={"const": 1}, strict=True)}, {"const": 1}, True),
        ({"response_format": json_schema(schema={"const": 1}, strict=False)}, {"const": 1}, False),
        ({"response_format": json_schema(schema={}, description="d", strict=None)}, {}, True),
        ({"json_schema": {"const": 1}, "json_spacing": "compact", "strict": False}, {"const": 1}, False),
    ],
)
def test_schemas_arrive(
    call: Call, scheduler: Any, path: str, stream: bool, body: Any, source: Any, strict: bool
) -> None:
    prompt = {"prompt": "a"} if path == "completions" else CHAT
    whole = {**prompt, **body, "max_tokens": 2}
    _ = chunks(call, path, whole) if stream else post(call, path, whole)
    constraint = scheduler.commands[0].constraint
    assert (constraint.kind, json.loads(constraint.source), constraint.strict) == ("schema", source, strict)
    assert constraint.spacing == body.get("json_spacing", "spaced")


def test_chat(call: Call, scheduler: Any) -> None:
    answer = post(call, "chat/completions", {**CHAT, "max_tokens": 4})
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "user", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert bytes(scheduler.commands[0].token_ids).decode() == RENDERED
    assert answer["usage"]["prompt_tokens"] == len(RENDERED)


def test_chat_goes_on_until_the_context_is_full_by_default(call: Call, scheduler: Any) -> None:
    post(call, "chat/completions", {**CHAT, "stop_token_ids": [ord("\n")]})
    assert scheduler.commands[0].params.max_new_tokens == 200


def test_chat_takes_text_parts_and_the_developer_role(call: Call, scheduler: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    post(call, "chat/completions", {"messages": messages, "max_completion_tokens": 1})
    assert bytes(scheduler.commands[0].token_ids).decode() == "system:be\nuser:ab\nassistant:"


def test_chat_logprobs(call: Call) -> None:
    [choice] = post(call, "chat/completions", {**CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": 1})[
        "choices"
    ]
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("u", -1.17, [117])
    assert first["top_logprobs"] == [{"token": "u", "logprob": -1.17, "bytes": [117]}]
    assert len(choice["logprobs"]["content"]) == 2


def test_chat_stream(call: Call) -> None:
    body = {**CHAT, "max_tokens": 4, "n": 2, "logprobs": True, "stream_options": {"include_usage": True}}
    parts = chunks(call, "chat/completions", body)
    usage = parts.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 8
    assert usage["usage"]["prompt_tokens"] == len(RENDERED)
    assert len({part["id"] for part in parts}) == 1
    for index in (0, 1):
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "user"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
        assert sum(len(c["logprobs"]["content"]) for c in mine if c["logprobs"]) == 4


def test_a_stream_has_no_usage_unless_asked(call: Call) -> None:
    parts = chunks(call, "completions", {"prompt": "a", "max_tokens": 2})
    assert all(part["choices"] for part in parts)


BAD = [
    ("completions", {}, "prompt"),
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": ["a", ""]}, "prompt[1]"),
    ("completions", {"prompt": ["a", 5]}, "prompt[1]"),
    ("completions", {"prompt": [1, True]}, "prompt[1]"),
    ("completions", {"prompt": [[1], [2, "a"]]}, "prompt[1][1]"),
    ("completions", {"prompt": ["a"] * 17}, "prompt"),
    ("completions", {"prompt": ["a", "b"], "n": 9}, "prompt"),
    ("completions", {"prompt": "a", "top_k": 1 << 64}, "top_k"),
    ("completions", {"prompt": "a", "user": 5}, "user"),
    ("completions", {"prompt": "a", "metadata": "x"}, "metadata"),
    ("completions", {"prompt": "a", "best_of": True}, "best_of"),
    ("completions", {"prompt": "a", "store": 0}, "store"),
    ("completions", {"prompt": [99999]}, "prompt[0]"),
    ("completions", {"prompt": "a" * 200}, "prompt"),
    ("completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ("completions", {"prompt": "a", "max_tokens": 200}, "max_tokens"),
    ("completions", {"prompt": "a", "max_new_tokens": 5}, "max_new_tokens"),
    ("completions", {"prompt": "a", "temperature": -1}, "temperature"),
    ("completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
    ("completions", {"prompt": "a", "logprobs": True}, "logprobs"),
    ("completions", {"prompt": "a", "n": 0}, "n"),
    ("completions", {"prompt": "a", "best_of": 3}, "best_of"),
    ("completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ("completions", {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ("completions", {"prompt": "a", "temprature": 1}, "temprature"),
    ("completions", {"prompt": "a", "regex": "("}, "regex"),
    ("completions", {"prompt": "a", "stream": True, "regex": "("}, "regex"),
    ("chat/completions", {}, "messages"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": "hi"}, "messages"),
    ("chat/completions", {"messages": ["hi"]}, "messages[0]"),
    ("chat/completions", {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ("chat/completions", {**CHAT, "top_logprobs": 1}, "top_logprobs"),
    ("chat/completions", {**CHAT, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ("chat/completions", {**CHAT, "max_tokens": 1, "max_completion_tokens": "x"}, "max_completion_tokens"),
    ("chat/completions", {**CHAT, "max_tokens": True, "max_completion_tokens": 1}, "max_tokens"),
    ("chat/completions", {**CHAT, "n": 17}, "messages"),
    ("chat/completions", {**CHAT, "response_format": "json_object"}, "response_format"),
    ("chat/completions", {**CHAT, "response_format": {"type": "xml"}}, "response_format.type"),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ("completions", {"prompt": "a", "response_format": json_schema(name="x")}, SCHEMA_FIELD),
    ("completions", {"prompt": "a", "response_format": json_schema(schema=5)}, SCHEMA_FIELD),
    (
        "completions",
        {"prompt": "a", "response_format": json_schema(schema={}), "regex": "a"},
        "response_format",
    ),
    ("completions", {"prompt": "a", "strict": False}, "strict"),
    ("completions", {"prompt": "a", "ebnf": "root ::= x"}, "ebnf"),
    ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tools"),
    ("chat/completions", {**CHAT, "tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {**CHAT, "modalities": ["audio"]}, "modalities"),
    ("chat/completions", {**CHAT, "store": True}, "store"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": "a" * 300}]}, "messages"),
    ("chat/completions", [], "body"),
]


@pytest.mark.parametrize(("path", "body", "field"), BAD)
def test_mistakes_are_400_in_openais_envelope(call: Call, path: str, body: Any, field: str) -> None:
    error = post(call, path, body, 400)["error"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(field)


def test_what_asks_for_nothing_is_taken(call: Call) -> None:
    neutral = {
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "modalities": ["text"],
        "store": False,
        "max_tokens": 1,
        "top_p": None,
        "stop": None,
        "logit_bias": None,
        "seed": None,
    }
    post(call, "chat/completions", {**CHAT, **neutral})


def test_another_model_is_not_found(call: Call) -> None:
    error = post(call, "chat/completions", {**CHAT, "model": "gpt-9"}, 404)["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "echo" in error["message"]


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/embeddings"])
def test_unknown_routes_have_the_envelope(call: Call, path: str) -> None:
    response = call("POST", path, {})
    assert response.status_code == 404
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
