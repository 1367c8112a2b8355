"""What the OpenAI routes take beyond OpenAI's own API, and what they tell of a prompt."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

Call = Callable[..., httpx.Response]
HI = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "So "}


def sent(scheduler: Any) -> str:
    return bytes(scheduler.commands[-1].token_ids).decode()


def post(call: Call, path: str, body: Any, status: int = 200) -> Any:
    response = call("POST", f"/v1/{path}", body)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize(
    ("messages", "fields", "prompt"),
    [
        ([HI], {}, "user:hi\nassistant:"),
        ([HI], {"add_generation_prompt": True}, "user:hi\nassistant:"),
        ([HI], {"add_generation_prompt": False}, "user:hi\n"),
        ([HI, BEGUN], {"continue_final_message": True}, "user:hi\nassistant:So "),
        (
            [HI, BEGUN],
            {"continue_final_message": True, "add_generation_prompt": False},
            "user:hi\nassistant:So ",
        ),
        ([HI, BEGUN], {"continue_final_message": False}, "user:hi\nassistant:So \nassistant:"),
    ],
)
def test_where_a_chat_goes_on(
    call: Call, scheduler: Any, messages: list[Any], fields: dict[str, Any], prompt: str
) -> None:
    post(call, "chat/completions", {"messages": messages, "max_tokens": 1, **fields})
    assert sent(scheduler) == prompt


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([HI], {"continue_final_message": True}),
        ([HI, BEGUN], {"continue_final_message": True, "add_generation_prompt": True}),
        ([HI, BEGUN], {"continue_final_message": 1}),
    ],
)
def test_a_message_that_cannot_be_continued(call: Call, messages: list[Any], fields: dict[str, Any]) -> None:
    error = post(call, "chat/completions", {"messages": messages, **fields}, 400)["error"]
    assert error["param"] == "continue_final_message"


def test_tokens_by_their_ids(call: Call) -> None:
    body = {"prompt": "ab", "max_tokens": 2, "logprobs": 1, "echo": True, "return_tokens_as_token_ids": True}
    logprobs = post(call, "completions", body)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", "token_id:98"] * 2
    assert logprobs["top_logprobs"][-1] == {"token_id:98": -0.98}
    asked = {"messages": [HI], "max_tokens": 1, "logprobs": True, "return_tokens_as_token_ids": True}
    [token] = post(call, "chat/completions", asked)["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == (f"token_id:{ord('u')}", [ord("u")])


def test_alternatives_of_the_prompt(call: Call) -> None:
    body = {"prompt": "abc", "max_tokens": 1, "logprobs": 1, "echo": True}
    logprobs = post(call, "completions", body)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [None, {"b": -0.98}, {"c": -0.99}, {"a": -0.97}]
    native = {"text": "abc", "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    native |= {"logprob_start_len": 0, "top_logprobs_num": 1}
    meta = call("POST", "/generate", native).json()["meta_info"]
    first, *others = meta["input_top_logprobs"]
    assert first is None
    assert [[entry[:2] for entry in top] for top in others] == [[[-0.98, 98]], [[-0.99, 99]]]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_usage_tells_what_was_forced(call: Call, path: str) -> None:
    prompt = {"prompt": "a"} if path == "completions" else {"messages": [HI]}
    details = post(call, path, {**prompt, "max_tokens": 2})["usage"]["completion_tokens_details"]
    assert details == {"forced_tokens": 0, "forward_passes": 0}


@pytest.mark.server
@pytest.mark.model
def test_alternatives_of_the_prompt_are_those_it_was_generated_with(server_url: str) -> None:
    def ask(prompt: str, **fields: Any) -> Any:
        body = {
            "prompt": prompt,
            "logprobs": 3,
            "temperature": 0,
            "return_tokens_as_token_ids": True,
            **fields,
        }
        return httpx.post(f"{server_url}/v1/completions", json=body, timeout=120).json()["choices"][0]

    prompt = "One, two, three, four,"
    written = ask(prompt, max_tokens=6)
    read = ask(prompt + written["text"], max_tokens=0, echo=True)
    count = len(written["logprobs"]["tokens"])
    assert read["logprobs"]["tokens"][-count:] == written["logprobs"]["tokens"]
    assert read["logprobs"]["top_logprobs"][0] is None
    for mine, theirs in zip(
        read["logprobs"]["top_logprobs"][-count:], written["logprobs"]["top_logprobs"], strict=True
    ):
        assert list(mine) == list(theirs)
        assert all(math.isclose(mine[token], theirs[token], abs_tol=1e-3) for token in mine)
