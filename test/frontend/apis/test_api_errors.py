"""Everything that may go wrong on the way to an API, as the errors of the language."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest

from trellis import (
    Anthropic,
    Backend,
    BackendError,
    CapacityError,
    InvalidRequestError,
    LiteLLM,
    OpenAI,
    ProgramError,
    RequestAborted,
    assistant,
    function,
    gen,
    user,
)

Make = Callable[..., Backend]


def openai_chat(url: str, **more: Any) -> OpenAI:
    return OpenAI("m", f"{url}/v1", "key", "chat", max_retries=0, **more)


def anthropic(url: str, **more: Any) -> Anthropic:
    return Anthropic("m", url, "key", max_retries=0, **more)


BOTH = pytest.mark.parametrize("make", [openai_chat, anthropic])


@function
def ask(s: Any) -> None:
    s += user("Hi") + assistant(gen("x"))


def cause(backend: Backend, **options: Any) -> Exception:
    """Why the program fails; it names the variable whichever way it fails."""
    with pytest.raises(ProgramError) as caught:
        ask.run(backend=backend, **options)["x"]
    assert caught.value.variable == "x"
    assert isinstance(caught.value.__cause__, Exception)
    return caught.value.__cause__


def error(message: str = "no", **more: Any) -> dict[str, Any]:
    return {"type": "error", "error": {"type": "some_error", "message": message, **more}}


STATUSES = [
    (401, {}, BackendError, 401, "check the API key"),
    (403, {}, BackendError, 403, "check the API key"),
    (404, {}, BackendError, 404, "a model 'm'"),
    (409, {}, RequestAborted, None, "HTTP 409"),
    (413, {}, CapacityError, 400, "HTTP 413"),
    (429, {}, CapacityError, 429, "HTTP 429"),
    (500, {}, BackendError, 500, "HTTP 500"),
    (503, {}, CapacityError, 503, "HTTP 503"),
    (529, {}, CapacityError, 529, "HTTP 529"),
    (400, {"param": "temperature"}, InvalidRequestError, None, "temperature"),
    (400, {"code": "context_length_exceeded"}, CapacityError, 400, "HTTP 400"),
    (400, {}, InvalidRequestError, None, "HTTP 400"),
    (422, {}, InvalidRequestError, None, "HTTP 422"),
]


@pytest.mark.parametrize(("status", "details", "kind", "kept", "says"), STATUSES)
@pytest.mark.parametrize("stream", [False, True])
@BOTH
def test_statuses(
    api: Any, make: Make, stream: bool, status: int, details: Any, kind: type, kept: int | None, says: str
) -> None:
    api.reply(error("the reason", **details), status=status)
    found = cause(make(api.url), stream=stream)
    assert type(found) is kind
    assert getattr(found, "status", None) == kept
    assert says in str(found)
    assert "the reason" in str(found)
    assert len(api.requests) == 1


@BOTH
@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("0.5", 0.5), ("soon", None), (None, None)])
def test_retry_after_is_kept(api: Any, make: Make, header: str | None, seconds: float | None) -> None:
    api.reply(error(), status=429, headers={"retry-after": header} if header else {})
    found = cause(make(api.url))
    assert isinstance(found, CapacityError)
    assert found.retry_after == seconds


def test_a_refused_request_is_sent_again_as_often_as_was_said(api: Any, answers: Any) -> None:
    api.reply(error(), status=429, headers={"retry-after-ms": "1"})
    api.reply(answers.chat("ok"))
    backend = OpenAI("m", f"{api.url}/v1", "key", "chat", max_retries=1)
    assert ask.run(backend=backend)["x"] == "ok"
    assert len(api.requests) == 2


@BOTH
def test_nobody_listens(make: Make) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = cause(make(f"http://127.0.0.1:{port}"))
    assert isinstance(found, BackendError)
    assert "connection failed" in str(found)


@BOTH
def test_no_answer_in_time(api: Any, make: Make) -> None:
    api.hang()
    found = cause(make(api.url, timeout=0.1))
    assert isinstance(found, BackendError)
    assert "timeout of 0.1 s" in str(found)


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"choices": []},
        {"choices": None},
        {"choices": [{}]},
        {"choices": [3]},
        [],
        3,
        None,
        "text",
        b"<html>",
    ],
    ids=repr,
)
def test_what_is_no_answer(api: Any, make: Make, body: Any) -> None:
    api.reply(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert isinstance(cause(make(api.url)), BackendError)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"finish": "content_filter"}, "content filter"),
        ({"finish": "tool_calls"}, "'tool_calls'"),
        ({"refusal": "I will not"}, "refused to answer: I will not"),
        ({"finish": "abort"}, "ended the request early"),
    ],
)
def test_answers_that_are_no_texts(api: Any, answers: Any, message: dict[str, Any], says: str) -> None:
    api.reply(answers.chat("part", **message))
    assert says in str(cause(openai_chat(api.url)))


def test_an_error_in_the_middle_of_a_stream(api: Any, answers: Any) -> None:
    chunks = answers.chat_chunks("Hel", "lo")[:2]
    api.reply(answers.events([*chunks, {"error": {"message": "broke", "type": "server_error"}}]))
    state = ask.run(backend=openai_chat(api.url), stream=True)
    pieces = []
    with pytest.raises(ProgramError, match="broke") as caught:
        pieces.extend(state.text_iter("x"))
    assert isinstance(caught.value.__cause__, BackendError)
    assert "".join(pieces) == "Hello"


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_a_stream_that_ends_early(api: Any, answers: Any, keep: int) -> None:
    api.reply(answers.events(answers.chat_chunks("Hel", "lo", finish=None)[:keep]))
    assert "before it was complete" in str(cause(openai_chat(api.url), stream=True))


def test_garbage_in_a_stream(api: Any) -> None:
    api.reply(["data: {not json\n\n"])
    assert isinstance(cause(openai_chat(api.url), stream=True), BackendError)


@BOTH
def test_cancelling_closes_the_connection(api: Any, make: Make) -> None:
    api.hang()
    state = ask.run(backend=make(api.url), stream=True)
    assert api.asked.wait(10)
    state.cancel()
    assert api.closed.wait(10)
    assert isinstance(state.error().__cause__, RequestAborted)


def test_leaving_a_stream_closes_the_connection(api: Any, answers: Any) -> None:
    first = answers.events(answers.chat_chunks("Hel"))[0]
    api.hang(first)
    with ask.run(backend=openai_chat(api.url), stream=True) as state:
        assert next(iter(state.text_iter("x"))) == "Hel"
    assert api.closed.wait(10)


@BOTH
def test_the_timeout_of_a_program_closes_the_connection(api: Any, make: Make) -> None:
    api.hang()
    backend = make(api.url)
    state = ask.run(backend=backend, stream=True)  # a client's first request takes a while
    assert api.asked.wait(10)
    state.cancel()
    assert api.closed.wait(10)
    api.closed.clear()
    api.asked.clear()
    with pytest.raises(ProgramError) as caught:
        ask.run(backend=backend, timeout=0.5)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert api.asked.is_set()
    assert api.closed.wait(10)


@BOTH
def test_text_that_has_no_utf8(make: Make) -> None:
    @function
    def broken(s: Any) -> None:
        s += user("\ud800") + assistant(gen("x"))

    with pytest.raises(ProgramError) as caught:
        broken.run(backend=make("http://127.0.0.1:9"))
    assert isinstance(caught.value.__cause__, InvalidRequestError)
    assert "Unicode" in str(caught.value)


def test_a_missing_key_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    refusal = str(cause(OpenAI("m", api="chat")))
    assert "OPENAI_API_KEY" in refusal
    assert refusal.endswith("any text for a server that wants none")


@pytest.mark.parametrize(
    ("package", "backend"), [("openai", OpenAI), ("anthropic", Anthropic), ("litellm", LiteLLM)]
)
def test_a_missing_package_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, package: str, backend: Any
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install 'trellis-lm\[{package}\]'"):
        backend("m")
