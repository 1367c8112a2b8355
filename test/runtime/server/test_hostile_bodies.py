"""Bodies that are small for a client and much work for the server: refused before the work, or worked on aside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from trellis.errors import ConstraintError
from trellis.runtime.manager.outcomes import error_of
from trellis.runtime.manager.validation import MAX_CALL_PATTERNS, compiles_patterns
from trellis.runtime.messages import FinishReason, GenerateCommand, SamplingParams
from trellis.runtime.server import openai
from trellis.runtime.server.app import create_app
from trellis.runtime.server.errors import body_of, status_of
from trellis.runtime.server.exchange import SMALL_BODY

Call = Callable[..., httpx.Response]


def patterns(first: int, count: int = 16) -> list[str]:
    return [f"a{{{i}}}b" for i in range(first, first + count)]


def refusal(answer: httpx.Response) -> tuple[str, str]:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error.get("field", error.get("param")), error["message"]


def test_patterns_of_all_prompts_together_are_bounded_before_one_is_compiled(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr("trellis.runtime.manager.validation.search_pattern", compiled.append)
    params = [{"max_new_tokens": 1, "stop_regex": patterns(16 * i + 1)} for i in range(3)]
    field, message = refusal(call("POST", "/generate", {"text": ["x"] * 3, "sampling_params": params}))
    assert field == "sampling_params"
    assert f"48 different stop_regex patterns; one request may have {MAX_CALL_PATTERNS}" in message
    assert compiled == []
    same = [{"max_new_tokens": 1, "stop_regex": patterns(1)}] * 3
    assert call("POST", "/generate", {"text": ["x"] * 3, "sampling_params": same}).status_code == 200


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"stop_regex": "a"}, True),
        ({"sampling_params": {"stop_regex": ["a"]}}, True),
        ({"sampling_params": [{}, {"stop_regex": "a"}]}, True),
        ({"sampling_params": [[[{"stop_regex": "a"}]], 5, None]}, False),
        ({"sampling_params": {"stop_regex": None}}, False),
        (["stop_regex"], False),
        (None, False),
    ],
)
def test_bodies_with_patterns_are_known(body: Any, expected: bool) -> None:
    assert compiles_patterns(body) is expected


def test_messages_and_their_parts_are_bounded_before_they_are_read(call: Call) -> None:
    route = "/v1/chat/completions"
    messages = [{"role": "nobody"}] * 100_000
    field, message = refusal(call("POST", route, {"messages": messages}))
    assert field == "messages"
    assert "100000 messages" in message
    assert "the context length, is the most" in message
    parts = [{"type": "nothing"}] * 100_000
    field, message = refusal(call("POST", route, {"messages": [{"role": "user", "content": parts}]}))
    assert field == "messages[0].content"
    assert "at most" in message


@pytest.mark.parametrize("size", [1, SMALL_BODY])
def test_other_requests_are_answered_while_a_template_is_at_work(
    engine: Any, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """size: of the message, in a small body and in a large one."""
    begun, go_on = threading.Event(), threading.Event()
    parse = openai.parse_chat

    def slow(raw: Any, runtime: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        return parse(raw, runtime)

    monkeypatch.setattr(openai, "parse_chat", slow)

    async def go() -> list[int]:
        transport = httpx.ASGITransport(app=create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"messages": [{"role": "user", "content": "x" * size}], "max_tokens": 1}
            chat = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
            await asyncio.to_thread(begun.wait, 10)
            health = await client.get("/health")
            assert not chat.done()
            go_on.set()
            return [health.status_code, (await chat).status_code]

    try:
        assert asyncio.run(go()) == [200, 200 if size == 1 else 400]  # the large one is no prompt that fits
    finally:
        go_on.set()


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/generate", 405, "/generate takes POST, not GET"),
        ("GET", "/v1/completions", 405, "/v1/completions takes POST, not GET"),
        ("POST", "/nothing", 404, "no such route: /nothing"),
        ("GET", "/v1/nothing", 404, "no such route: /v1/nothing"),
    ],
)
def test_a_wrong_path_or_method_is_told_what_would_be_right(
    call: Call, method: str, path: str, status: int, words: str
) -> None:
    answer = call(method, path)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("params", "field", "words"),
    [
        ({"stop_regex": 5}, "stop_regex", "must be a string or a list of strings, not an integer"),
        ({"stop": {}}, "stop", "must be a string or a list of strings, not an object"),
        ({"logit_bias": [1]}, "logit_bias", "must be an object of token id to bias, not a list"),
        ({"temperature": 101}, "temperature", "must be from 0 to 100, not 101"),
    ],
)
def test_the_same_mistake_has_the_same_answer_on_every_route(
    call: Call, params: dict[str, Any], field: str, words: str
) -> None:
    native = refusal(call("POST", "/generate", {"text": "x", "sampling_params": params}))
    completion = refusal(call("POST", "/v1/completions", {"prompt": "x", **params}))
    messages = [{"role": "user", "content": "x"}]
    chat = refusal(call("POST", "/v1/chat/completions", {"messages": messages, **params}))
    assert native == (f"sampling_params.{field}", f"sampling_params.{field}: {words}")
    assert completion == chat == (field, f"{field}: {words}")


def test_too_many_alternatives_are_named(call: Call) -> None:
    field, message = refusal(
        call("POST", "/generate", {"text": "x", "return_logprob": True, "top_logprobs_num": 200})
    )
    assert field == "top_logprobs_num"
    assert message.endswith("must be from 0 to 128, not 200")


def test_a_stop_pattern_that_turns_out_too_costly_is_named() -> None:
    finish = FinishReason("error", message="stop_regex: bound its repeats", status=400, code="limit")
    command = GenerateCommand(rid="a", token_ids=[1], params=SamplingParams(stop_regex=["a{9}"]))
    error = error_of(finish, command)
    assert isinstance(error, ConstraintError)
    assert status_of(error) == 400
    told = {"type": "invalid_request_error", "code": "constraint_limit"}
    message = "stop_regex: bound its repeats"
    assert body_of(error, openai=False)["error"] == {**told, "message": message, "field": "stop_regex"}
    assert body_of(error, openai=True)["error"] == {**told, "message": message, "param": "stop_regex"}
