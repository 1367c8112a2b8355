"""The native routes over a runtime that echoes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest

from trellis.runtime.server.app import create_app

Call = Callable[..., httpx.Response]


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def generate(call: Call, status: int = 200, **body: Any) -> Any:
    response = call("POST", "/generate", body)
    assert response.status_code == status, response.text
    return response.json()


def test_generate_text(call: Call) -> None:
    answer = generate(call, text="abcdef", sampling_params={"max_new_tokens": 3}, rid="mine")
    assert (answer["text"], answer["output_ids"]) == ("abc", [97, 98, 99])
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (6, 3, 0)
    assert (meta["kept_tokens"], meta["tail_text"]) == (3, "")
    assert meta["e2e_latency"] > 0
    assert "output_token_logprobs" not in meta


def test_generate_from_ids_and_segments(call: Call) -> None:
    params = {"max_new_tokens": 3}
    assert generate(call, input_ids=[120, 121], sampling_params=params)["text"] == "xyx"
    assert generate(call, segments=["x", [121], "z"], sampling_params=params)["text"] == "xyz"


def test_lists_give_lists(call: Call, scheduler: Any) -> None:
    params = {"max_new_tokens": 2}
    texts = generate(call, text=["ab", "cd"], sampling_params=params)
    assert [each["text"] for each in texts] == ["ab", "cd"]
    assert len(scheduler.batches) == 1
    ids = generate(call, input_ids=[[97], [98]], sampling_params=[params, {"max_new_tokens": 3}])
    assert [each["text"] for each in ids] == ["aa", "bbb"]
    assert [each["text"] for each in generate(call, text=["ab"], sampling_params=params)] == ["ab"]


def test_n_samples_stand_next_to_each_other(call: Call, scheduler: Any) -> None:
    params = {"max_new_tokens": 2, "n": 2, "seed": 5}
    answers = generate(call, text=["ab", "cd"], sampling_params=params, rid=["x", "y"])
    assert [each["text"] for each in answers] == ["ab", "ab", "cd", "cd"]
    assert [each["meta_info"]["id"] for each in answers] == ["x", "x", "y", "y"]
    assert [command.params.seed for command in scheduler.commands] == [5, 6, 5, 6]


def test_stop_string_and_stop_token(call: Call) -> None:
    answer = generate(call, text="abcdef", sampling_params={"max_new_tokens": 9, "stop": ["d"]})
    assert answer["text"] == "abc"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "d"}
    answer = generate(call, text="abcdef", sampling_params={"max_new_tokens": 9, "stop_token_ids": [99]})
    assert (answer["text"], answer["output_ids"]) == ("ab", [97, 98, 99])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 99}
    assert answer["meta_info"]["kept_tokens"] == 2


def test_logprobs(call: Call) -> None:
    answer = generate(
        call,
        text="abc",
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.97, 97, "a"], [-0.98, 98, "b"]]
    assert meta["output_top_logprobs"] == [[[-0.97, 97, "a"]], [[-0.98, 98, "b"]]]
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [-0.98, 98, "b"], [-0.99, 99, "c"]]
    without_text = generate(call, text="abc", sampling_params={"max_new_tokens": 1}, return_logprob=True)
    assert without_text["meta_info"]["output_token_logprobs"] == [[-0.97, 97, None]]
    assert "input_token_logprobs" not in without_text["meta_info"]


def test_logprob_fields_that_ask_for_nothing_need_no_logprobs(call: Call) -> None:
    nothing = {"logprob_start_len": None, "top_logprobs_num": None, "return_text_in_logprobs": False}
    defaults = {"logprob_start_len": -1, "top_logprobs_num": 0, "return_text_in_logprobs": None}
    for fields in (nothing, defaults):
        answer = generate(call, text="a", sampling_params={"max_new_tokens": 1}, **fields)
        assert answer["text"] == "a"


def test_stream_carries_the_whole_text_so_far(call: Call) -> None:
    body = {"text": "aé€", "sampling_params": {"max_new_tokens": 6}, "stream": True, "return_logprob": True}
    response = call("POST", "/generate", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    answers = events(response)
    texts = [each["text"] for each in answers]
    assert texts[-1] == "aé€"
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    for answer in answers:
        assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])
        assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])
    assert [each["meta_info"]["finish_reason"] is not None for each in answers].count(True) == 1


def test_stream_of_a_list_says_which(call: Call) -> None:
    body = {"text": ["ab", "cd"], "sampling_params": {"max_new_tokens": 2}, "stream": True}
    last = {each["index"]: each["text"] for each in events(call("POST", "/generate", body))}
    assert last == {0: "ab", 1: "cd"}


def test_score(call: Call) -> None:
    response = call("POST", "/score", {"text": "x ", "options": ["yes", "no"], "cache_salt": "s"})
    options = response.json()["options"]
    assert [bytes(each["token_ids"]) for each in options] == [b"yes", b"no"]
    assert options[1]["logprobs"] == [-1.1, -1.11]
    assert response.json()["meta_info"]["prompt_tokens"] == 9
    segments = call("POST", "/score", {"segments": ["x", [32]], "options": ["yes"]})
    assert bytes(segments.json()["options"][0]["token_ids"]) == b"yes"


def test_cache_salt_is_the_namespace(call: Call, scheduler: Any) -> None:
    generate(call, text="a", cache_salt="tenant", sampling_params={"max_new_tokens": 1})
    assert scheduler.commands[0].namespace == "tenant"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text"),
        ({"text": None}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": 5}, "text"),
        ({"text": ["a", 5]}, "text[1]"),
        ({"text": ["a", ""]}, "text[1]"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, "a"]}, "input_ids[1]"),
        ({"input_ids": [1, True]}, "input_ids[1]"),
        ({"input_ids": [[1], [2, False]]}, "input_ids[1][1]"),
        ({"input_ids": [1, [2]]}, "input_ids[0]"),
        ({"input_ids": [[1], ["a"]]}, "input_ids[1][0]"),
        ({"input_ids": [99999]}, "input_ids[0]"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"segments": ["a", {}]}, "segments[1]"),
        ({"segments": [1, 2]}, "segments[0]"),
        ({"segments": ["a", [True]]}, "segments[1][0]"),
        ({"text": ["a"] * 17}, "text"),
        ({"text": ["a", "b"], "sampling_params": {"n": 9}}, "text"),
        ({"input_ids": [[1]], "sampling_params": {"n": 17}}, "input_ids"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 1 << 64}}, "sampling_params.max_new_tokens"),
        ({"text": "a" * 200}, "text"),
        ({"text": "a" * 10_000}, "text"),
        ({"text": "a", "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ({"text": "a", "sampling_params": {"max_tokens": 2}}, "sampling_params.max_tokens"),
        ({"text": "a", "sampling_params": 5}, "sampling_params"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"top_k": 0}]}, "sampling_params[1].top_k"),
        ({"text": "a", "sampling_params": {"regex": "("}}, "regex"),
        ({"text": "a", "stream": 1}, "stream"),
        ({"text": "a", "strem": True}, "strem"),
        ({"text": "a", "rid": 5}, "rid"),
        ({"text": "a", "rid": ["x", "y"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": "a", "return_logprob": "yes"}, "return_logprob"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 1000}, "top_logprobs_num"),
        ({"text": "a", "top_logprobs_num": 1}, "top_logprobs_num"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "a", "return_text_in_logprobs": True}, "return_text_in_logprobs"),
        ({"text": "a", "return_logprob": False, "top_logprobs_num": 1}, "top_logprobs_num"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ([], "body"),
        ("text", "body"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_are_400_and_name_the_field(call: Call, body: Any, field: str, stream: bool) -> None:
    if stream and isinstance(body, dict):
        body = {"stream": True, **body}
    response = call("POST", "/generate", body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["field"] == field
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert generate(call, text="ok", sampling_params={"max_new_tokens": 1})["text"] == "o"


def test_a_bad_constraint_has_a_code(call: Call) -> None:
    error = generate(call, 400, text="a", sampling_params={"regex": "("})["error"]
    assert error["code"] == "constraint_syntax"
    assert "position 0" in error["message"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"text": NaN}', b'{"text": "\\ud800"}', b'{"text": "\xff"}', b"[" * 100_000, b"\x00"],
)
def test_what_is_not_json_is_400(call: Call, content: bytes) -> None:
    response = call("POST", "/generate", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["field"] == "body"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (r'{"text": "a\udc00b"}', r"lone surrogate \udc00 at byte 11"),
        (r'{"text": "\ud800"}', r"lone surrogate \ud800 at byte 10"),
        (r'{"text": "\ud83d\ude00\ud801 and more text"}', r"lone surrogate \ud801 at byte 22"),
        (r'{"text": "\ud83d\ude00\udc01 and more text"}', r"lone surrogate \udc01 at byte 22"),
        (r'{"text": "\ud802\u0041 and more text"}', r"lone surrogate \ud802 at byte 10"),
        (r'{"text": "\ud83d\ude00abc', "truncated"),
    ],
)
def test_half_of_a_surrogate_pair_is_named(call: Call, content: str, named: str) -> None:
    headers = {"content-type": "application/json"}
    response = call("POST", "/generate", content=content.encode(), headers=headers)
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]


def test_other_content_types_are_refused(call: Call) -> None:
    response = call("POST", "/generate", content=b'{"text": "a"}', headers={"content-type": "text/plain"})
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


def test_a_body_has_a_limit(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trellis.runtime.server.exchange.BODY_LIMIT", 1000)
    response = call("POST", "/generate", {"text": "a" * 1000})
    assert response.status_code == 413
    assert "1000 bytes" in response.json()["error"]["message"]


def test_a_score_may_include_the_tokens_without_their_prompt(call: Call) -> None:
    body = {"text": "ab", "options": ["c", "cd"], "unconditional": True}
    options = call("POST", "/score", body).json()["options"]
    for option in options:
        assert len(option["unconditional"]) == len(option["logprobs"]) == len(option["token_ids"])
    plain = call("POST", "/score", {"text": "ab", "options": ["c", "cd"]}).json()["options"]
    assert [option["logprobs"] for option in plain] == [option["logprobs"] for option in options]
    assert all("unconditional" not in option for option in plain)


def test_a_stop_pattern_and_a_bias_are_fields_of_the_native_api(call: Call, scheduler: Any) -> None:
    generate(call, text="a", sampling_params={"stop_regex": r"\n+", "logit_bias": {"97": -3}})
    params = scheduler.commands[0].params
    assert (params.stop_regex, params.logit_bias) == ([r"\n+"], {97: -3.0})
    wrong = call("POST", "/generate", {"text": "a", "sampling_params": {"stop_regex": ["a", "^b"]}})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["field"] == "sampling_params.stop_regex[1]"
    wrong = call("POST", "/generate", {"text": "a", "sampling_params": {"logit_bias": {"x": 1}}})
    assert wrong.json()["error"]["field"] == "sampling_params.logit_bias"


def test_a_score_takes_one_prompt_and_known_fields(call: Call) -> None:
    for body, field in (
        ({"text": ["a"], "options": ["b"]}, "text"),
        ({"text": "a"}, "options"),
        ({"text": "a", "options": ["b", 5]}, "options[1]"),
        ({"text": "a", "options": ["b"] * 17}, "options"),
        ({"text": "a", "options": ["b"], "x": 1}, "x"),
        ({"text": "", "options": ["b"]}, "text"),
    ):
        response = call("POST", "/score", body)
        assert response.status_code == 400
        assert response.json()["error"]["field"] == field


def test_unknown_paths_and_methods(call: Call) -> None:
    missing = call("GET", "/nothing")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    wrong = call("GET", "/generate")
    assert wrong.status_code == 405
    assert "message" in wrong.json()["error"]


def test_too_many_at_once_is_400_when_it_can_never_fit(call: Call) -> None:
    response = call("POST", "/generate", {"text": ["a"] * 17, "sampling_params": {"max_new_tokens": 1}})
    assert response.status_code == 400
    assert "17 sequences" in response.json()["error"]["message"]


def test_health_follows_the_scheduler(call: Call, scheduler: Any) -> None:
    response = call("GET", "/health")
    assert (response.status_code, response.json()["status"]) == (200, "ok")
    response = call("HEAD", "/health")
    assert (response.status_code, response.content) == (200, b"")
    scheduler.explode = True
    response = call("POST", "/generate", {"text": "a"})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "boom" in response.json()["error"]["message"]
    response = call("GET", "/health")
    assert (response.status_code, response.json()["status"]) == (503, "ended")
    response = call("HEAD", "/health")
    assert (response.status_code, response.content) == (503, b"")


def test_health_does_not_wait_for_a_step(call: Call, scheduler: Any) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow_step() -> list[Any]:
        entered.set()
        leave.wait(30)
        return []

    scheduler.step = slow_step
    scheduler.has_work = lambda: not leave.is_set()
    assert entered.wait(30)
    assert call("GET", "/health").status_code == 200
    leave.set()


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
def test_model_info(call: Call, path: str) -> None:
    info = call("GET", path).json()
    assert info["model_path"] == "echo"
    assert info["is_generation"] is True
    assert (info["context_length"], info["vocab_size"]) == (200, 258)
    assert info["chat_format"]["roles"]["user"] == ["user:", "\n"]
    assert info["chat_format"]["default_system"] == ""
    assert info["chat_format"]["begin"] == ""


def test_server_info(call: Call) -> None:
    info = call("GET", "/server_info").json()
    assert info["running_requests"] == 0
    assert info["in_flight"] == 0
    assert info["health"]["status"] == "ok"
    assert info["config"]["schedule_policy"] == "lpm"


def test_the_key_is_nowhere_in_server_info(engine_with: Any) -> None:
    with engine_with(api_key="sesame") as engine:
        assert engine.config.public()["api_key"] == "set"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_cache(call: Call, scheduler: Any, method: str) -> None:
    response = call(method, "/flush_cache")
    assert response.json() == {"success": True, "freed_tokens": 7}
    assert scheduler.flushes == 1


def test_set_policy(call: Call, scheduler: Any) -> None:
    assert call("POST", "/set_policy", {"policy": "fcfs"}).json() == {"success": True, "policy": "fcfs"}
    assert scheduler.policy == "fcfs"
    for body in ({}, {"policy": 5}, {"name": "fcfs"}):
        assert call("POST", "/set_policy", body).status_code == 400


def test_abort_request(call: Call) -> None:
    assert call("POST", "/abort_request", {"rid": "unknown"}).json() == {"aborted": 0}
    assert call("POST", "/abort_request", {"abort_all": True}).json() == {"aborted": 0}
    for body in ({}, {"rid": "x", "abort_all": True}, {"rid": 5}, {"id": "x"}):
        assert call("POST", "/abort_request", body).status_code == 400


def test_an_aborted_request_answers_with_what_it_has(engine: Any, scheduler: Any) -> None:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            scheduler.gate.clear()
            pending = asyncio.ensure_future(
                client.post(
                    "/generate", json={"text": "ab", "rid": "r1", "sampling_params": {"max_new_tokens": 9}}
                )
            )
            while not scheduler.running:
                await asyncio.sleep(0.005)
            assert (await client.post("/abort_request", json={"rid": "r"})).json() == {"aborted": 0}
            assert (await client.post("/abort_request", json={"rid": "r1"})).json() == {"aborted": 1}
            return await pending

    response = asyncio.run(go())
    assert response.status_code == 200
    assert response.json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_an_error_after_the_stream_began_is_an_event(engine: Any, scheduler: Any) -> None:
    steps = 0
    real_step = scheduler.step

    def failing_step() -> list[Any]:
        nonlocal steps
        steps += 1
        if steps > 3:
            raise RuntimeError("boom")
        return real_step()

    scheduler.step = failing_step

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"text": "ab", "stream": True, "sampling_params": {"max_new_tokens": 50}}
            return await client.post("/generate", json=body)

    response = asyncio.run(go())
    assert response.status_code == 200
    answers = events(response)
    assert "boom" in answers[-1]["error"]["message"]
    assert all("text" in answer for answer in answers[:-1])
