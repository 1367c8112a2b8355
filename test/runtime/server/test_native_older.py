"""What clients of the original system count on: the log-probabilities that their ``select`` reads, and older routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

Call = Callable[..., httpx.Response]

PROMPT = "abcdef"


def prompt_logprobs(call: Call, max_new_tokens: int = 0, **fields: Any) -> list[Any] | None:
    """The entries of PROMPT's tokens, as (logprob, text)."""
    params = {"max_new_tokens": max_new_tokens, "temperature": 0}
    body = {
        "text": PROMPT,
        "sampling_params": params,
        "return_logprob": True,
        "return_text_in_logprobs": True,
    }
    response = call("POST", "/generate", {**body, **fields})
    assert response.status_code == 200, response.text
    entries = response.json()["meta_info"].get("input_token_logprobs")
    return None if entries is None else [(entry[0], entry[2]) for entry in entries]


def test_a_start_above_zero_is_context_with_the_token_after_it(call: Call) -> None:
    everything = prompt_logprobs(call, logprob_start_len=0)
    assert everything is not None
    assert [text for _, text in everything] == list(PROMPT)
    assert everything[0][0] is None
    for start in range(1, len(PROMPT)):
        assert prompt_logprobs(call, logprob_start_len=start) == everything[start + 1 :]


def test_a_prompt_length_less_two_begins_with_its_last_token(call: Call) -> None:
    """What a client does that scores "ef" after "abcd"."""
    answer = call("POST", "/generate", {"text": "abcd", "sampling_params": {"max_new_tokens": 0}}).json()
    entries = prompt_logprobs(call, logprob_start_len=answer["meta_info"]["prompt_tokens"] - 2)
    assert entries is not None
    assert [text for _, text in entries] == ["d", "e", "f"]


def test_a_request_that_generates_nothing_wants_the_prompts(call: Call) -> None:
    assert prompt_logprobs(call) == prompt_logprobs(call, logprob_start_len=0)
    assert prompt_logprobs(call, logprob_start_len=-1) is None
    assert prompt_logprobs(call, max_new_tokens=1) is None


@pytest.mark.parametrize("start", [len(PROMPT), 99])
def test_a_start_beyond_the_prompt_is_a_mistake(call: Call, start: int) -> None:
    body = {"text": PROMPT, "return_logprob": True, "logprob_start_len": start}
    response = call("POST", "/generate", body)
    assert response.status_code == 400
    assert response.json()["error"]["field"] == "logprob_start_len"


def test_the_mean_leaves_out_what_is_not_known(call: Call) -> None:
    for start in (0, 3, len(PROMPT) - 1):
        body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
        meta = call("POST", "/generate", {**body, "logprob_start_len": start}).json()["meta_info"]
        known = [entry[0] for entry in meta["input_token_logprobs"] if entry[0] is not None]
        expected = pytest.approx(sum(known) / len(known)) if known else None
        assert meta["normalized_prompt_logprob"] == expected


def test_information_has_its_older_names(call: Call) -> None:
    assert call("GET", "/get_model_info").json() == call("GET", "/model_info").json()
    assert set(call("GET", "/get_server_info").json()) == set(call("GET", "/server_info").json())
    assert call("GET", "/get_server_args").json() == call("GET", "/server_info").json()["config"]


def test_concatenation_is_taken_and_computes_nothing(call: Call, scheduler: Any) -> None:
    response = call("POST", "/concate_and_append_request", {"src_rids": ["a", "b"], "dst_rid": "c"})
    assert (response.status_code, response.json()) == (200, {"success": True})
    assert scheduler.commands == []
    wrong = call("POST", "/concate_and_append_request", {"src_rids": ["a", 5], "dst_rid": "c"})
    assert wrong.json()["error"]["field"] == "src_rids[1]"
