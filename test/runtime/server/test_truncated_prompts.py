"""Prompts over the limit on every route: refused with their length and the limit, or cut with a warning."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from trellis import Engine, function, gen
from trellis.runtime.server.app import create_app

CONTEXT = 200
LONG = "abcdefghij" * 30
CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": LONG}]
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"text": LONG, "sampling_params": {"max_new_tokens": 20}},
    "/v1/completions": {"prompt": LONG, "max_tokens": 20},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 20},
}


@pytest.fixture
def lenient(engine_with: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Sends a body to a server with the flag."""
    with engine_with(allow_auto_truncate=True) as engine:
        app = create_app(engine)

        def send(path: str, body: Any) -> httpx.Response:
            async def go() -> httpx.Response:
                transport = httpx.ASGITransport(app=app)
                async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                    return await client.post(path, json=body)

            return asyncio.run(go())

        yield send


@pytest.mark.parametrize(
    ("path", "length"), [("/generate", 300), ("/v1/completions", 300), ("/v1/chat/completions", 332)]
)
def test_without_the_flag_the_refusal_names_length_and_limit(call: Any, path: str, length: int) -> None:
    answer = call("POST", path, ROUTES[path])
    assert answer.status_code == 400
    assert (
        f"has {length} tokens; the context length is {CONTEXT}, so a prompt may have at most 199"
        in answer.text
    )


def test_generate_says_how_much_was_cut(lenient: Any, scheduler: Any) -> None:
    meta = lenient("/generate", ROUTES["/generate"]).json()["meta_info"]
    cut = 300 - len(scheduler.commands[0].token_ids)
    assert 300 - cut + 20 <= CONTEXT
    assert meta["truncated_tokens"] == cut
    assert meta["warnings"] == [f"the prompt was too long: {cut} tokens at its beginning were cut"]
    assert meta["prompt_tokens"] == 300 - cut
    short = lenient("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 2}}).json()[
        "meta_info"
    ]
    assert short["truncated_tokens"] == 0
    assert "warnings" not in short


def test_each_prompt_of_a_batch_has_its_own(lenient: Any) -> None:
    body = {"text": ["abc", LONG], "sampling_params": {"max_new_tokens": 2}}
    first, second = (each["meta_info"] for each in lenient("/generate", body).json())
    assert first["truncated_tokens"] == 0 < second["truncated_tokens"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_choices_carry_the_warning(lenient: Any, scheduler: Any, path: str) -> None:
    answer = lenient(path, ROUTES[path]).json()
    [choice] = answer["choices"]
    assert "tokens at its beginning were cut" in choice["warnings"][0]
    assert answer["usage"]["prompt_tokens"] == len(scheduler.commands[0].token_ids)
    assert answer["usage"]["completion_tokens"] == 20


def test_a_chat_keeps_the_opening_of_the_answer(lenient: Any, scheduler: Any) -> None:
    lenient("/v1/chat/completions", ROUTES["/v1/chat/completions"])
    assert bytes(scheduler.commands[0].token_ids).endswith(b"abcdefghij\nassistant:")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_last_chunk_of_a_stream_carries_it(lenient: Any, path: str) -> None:
    text = lenient(path, {**ROUTES[path], "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    warned = [choice for each in events for choice in each["choices"] if "warnings" in choice]
    assert [choice["finish_reason"] for choice in warned] == ["length"]


def test_a_prompt_that_only_fills_the_cache_leaves_room_for_one_token(lenient: Any, scheduler: Any) -> None:
    body = {"text": LONG, "sampling_params": {"max_new_tokens": 0}}
    assert lenient("/generate", body).status_code == 200
    assert len(scheduler.commands[0].token_ids) < CONTEXT


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_as_long_as_the_context_is_what_is_refused(lenient: Any, path: str) -> None:
    answer = lenient(path, {**ROUTES[path], "max_tokens": CONTEXT})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"
    assert "200 leave no room for a prompt in the context length of 200" in answer.text


def test_sixteen_contexts_are_cut_and_more_are_refused_by_their_number(lenient: Any) -> None:
    body = {"input_ids": [65] * (16 * CONTEXT), "sampling_params": {"max_new_tokens": 2}}
    assert lenient("/generate", body).status_code == 200
    body["input_ids"] = [65] * (16 * CONTEXT + 1)
    answer = lenient("/generate", body)
    assert answer.status_code == 400
    assert (
        "has 3201 tokens; 16 times the context length is 3200, so a prompt may have at most 3200"
        in answer.text
    )


def test_a_program_finds_it_in_its_state(tiny_model: Path) -> None:
    @function
    def go_on(s: Any, text: str) -> None:
        s += text
        s += gen("more", max_tokens=8)

    with Engine(str(tiny_model), context_length=64, max_total_tokens=256, allow_auto_truncate=True) as engine:
        state = go_on.run(text=LONG, backend=engine, temperature=0)
        short = go_on.run(text="abc", backend=engine, temperature=0)
    assert state.meta("more").truncated_tokens >= 300 + 8 - 64
    assert short.meta("more").truncated_tokens == 0
