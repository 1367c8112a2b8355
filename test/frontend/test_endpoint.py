"""RuntimeEndpoint against a server that is only a function, and against sockets that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import socket
import threading
import traceback

import httpx
import pytest

from trellis.errors import (
    BackendError,
    CapacityError,
    ConstraintError,
    InvalidRequestError,
    ProgramError,
    RequestAborted,
    TrellisError,
)
from trellis.frontend import RuntimeEndpoint, assistant, flush_cache, function, gen, select, server_info, user
from trellis.frontend.backends import endpoint as endpoint_module
from trellis.frontend.backends.base import Constraint, GenerateRequest, SamplingOptions
from trellis.frontend.backends.sse import SSEParser

pytestmark = pytest.mark.timeout(60)
REQUEST = GenerateRequest(("hi", (1, 2), "there"), SamplingOptions(stop=("!",)))
META = {
    "id": "r1",
    "finish_reason": {"type": "stop", "matched": "!"},
    "prompt_tokens": 9,
    "cached_tokens": 4,
    "completion_tokens": 3,
    "sampled_tokens": 2,
    "forced_tokens": 1,
    "forward_passes": 2,
    "kept_tokens": 2,
    "tail_text": "ld",
    "e2e_latency": 0.5,
}
ANSWER = {"text": "hello world", "output_ids": [5, 6, 7], "meta_info": META}


class Server:
    """A function for each path; keeps what it was asked."""

    def __init__(self, **routes) -> None:
        self.routes = routes
        self.requests: list[tuple[str, str, object, httpx.Headers]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.requests.append((request.method, request.url.path, body, request.headers))
        answer = self.routes[request.url.path.strip("/")]
        return answer(body) if callable(answer) else httpx.Response(200, json=answer)

    def endpoint(self, **options) -> RuntimeEndpoint:
        return RuntimeEndpoint("http://server:1/", transport=httpx.MockTransport(self), **options)


def ask(endpoint: RuntimeEndpoint, request: GenerateRequest = REQUEST):
    return asyncio.run(endpoint.generate(request))


def ask_stream(endpoint: RuntimeEndpoint):
    async def read():
        return [chunk async for chunk in endpoint.stream(REQUEST)]

    return asyncio.run(read())


def sse(*events: object, cut: int = 7) -> httpx.Response:
    raw = "".join(f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in events).encode()

    async def pieces():
        for i in range(0, len(raw), cut):
            yield raw[i : i + cut]

    return httpx.Response(200, content=pieces())


def test_the_request_carries_segments_and_parameters() -> None:
    server = Server(generate=ANSWER)
    request = GenerateRequest(
        ("hi", (1, 2)),
        SamplingOptions(max_new_tokens=5, temperature=0.0, seed=3),
        Constraint("regex", "a+"),
        True,
        2,
    )
    ask(server.endpoint(api_key="secret"), request)
    [(method, path, body, headers)] = server.requests
    assert (method, path) == ("POST", "/generate")
    assert headers["authorization"] == "Bearer secret"
    assert body["segments"] == ["hi", [1, 2]]  # type: ignore[index]
    assert body["return_logprob"] is True  # type: ignore[index]
    assert body["top_logprobs_num"] == 2  # type: ignore[index]
    params = body["sampling_params"]  # type: ignore[index]
    assert (params["max_new_tokens"], params["temperature"], params["seed"], params["regex"]) == (
        5,
        0.0,
        3,
        "a+",
    )


def test_choices_go_as_a_list_and_a_missing_seed_does_not_go() -> None:
    server = Server(generate=ANSWER)
    ask(server.endpoint(), GenerateRequest(("a",), SamplingOptions(), Constraint("choices", '["é", "b"]')))
    params = server.requests[0][2]["sampling_params"]  # type: ignore[index]
    assert params["choices"] == ["é", "b"]
    assert "seed" not in params


def test_the_answer_is_read_completely() -> None:
    meta = {
        **META,
        "output_token_logprobs": [[-0.5, 5, None], [None, 6, "x"], [-1.5, 7, None]],
        "output_top_logprobs": [[[-0.5, 5, None], [-2.0, 9, None]], [], [[-1.5, 7, None]]],
    }
    done = ask(Server(generate={**ANSWER, "meta_info": meta}).endpoint())
    assert (done.text, done.token_ids, done.kept_tokens, done.tail_text) == (
        "hello world",
        (5, 6, 7),
        2,
        "ld",
    )
    assert (done.finish_reason, done.matched) == ("stop", "!")
    assert (done.counts.prompt_tokens, done.counts.cached_tokens, done.counts.forced_tokens) == (9, 4, 1)
    assert done.logprobs == (-0.5, -math.inf, -1.5)
    assert done.top_logprobs == (((5, -0.5), (9, -2.0)), (), ((7, -1.5),))


def test_scores() -> None:
    answer = {
        "options": [{"token_ids": [1], "logprobs": [-1.0]}, {"token_ids": [2, 3], "logprobs": [None, -2.0]}]
    }
    server = Server(score={**answer, "meta_info": {"prompt_tokens": 7}})
    result = asyncio.run(server.endpoint().score(("a", (4,)), ("x", "y")))
    assert server.requests[0][2] == {"segments": ["a", [4]], "options": ["x", "y"]}
    assert [o.token_ids for o in result.options] == [(1,), (2, 3)]
    assert result.options[1].logprobs == (-math.inf, -2.0)
    assert result.counts.prompt_tokens == 7


def test_the_model_is_asked_about_once() -> None:
    chat = {"roles": {"user": ["<u>", "</u>"]}, "default_system": "<s>be</s>", "begin": "^"}
    server = Server(get_model_info={"model_path": "m", "context_length": 99, "chat_format": chat})
    endpoint = server.endpoint()

    async def ask_twice():
        return await endpoint.model_info(), await endpoint.model_info()

    first, second = asyncio.run(ask_twice())
    assert first is second
    assert len(server.requests) == 1
    assert (first.model, first.context_length) == ("m", 99)
    assert first.chat_format.roles == {"user": ("<u>", "</u>")}
    assert (first.chat_format.default_system, first.chat_format.begin) == ("<s>be</s>", "^")


def test_flush_cache_and_server_info() -> None:
    server = Server(flush_cache={"success": True}, server_info={"tokens": 3})
    endpoint = server.endpoint()
    flush_cache(endpoint)
    assert server_info(endpoint) == {"tokens": 3}
    assert [r[:2] for r in server.requests] == [("POST", "/flush_cache"), ("GET", "/server_info")]


def test_streamed_text_is_cumulative_on_the_wire_and_new_in_the_chunks() -> None:
    def event(text, reason=None):
        meta = {**META, "finish_reason": reason, "tail_text": ""}
        return {"text": text, "output_ids": [5, 6, 7], "meta_info": meta}

    server = Server(
        generate=lambda _b: sse(
            event(""), event("hé"), event("hé"), event("héllo", {"type": "length"}), "[DONE]"
        )
    )
    chunks = ask_stream(server.endpoint())
    assert server.requests[0][2]["stream"] is True  # type: ignore[index]
    assert [c.text for c in chunks] == ["hé", "llo", ""]
    assert [c.final is None for c in chunks] == [True, True, False]
    assert chunks[-1].final.text == "héllo"
    assert chunks[-1].final.finish_reason == "length"


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([{"text": "a", "meta_info": {"finish_reason": None}}], "ended before the answer was complete"),
        (
            [{"text": "a", "meta_info": {"finish_reason": None}}, "[DONE]"],
            "ended before the answer was complete",
        ),
        (["[DONE]"], "ended before the answer was complete"),
        (["not json"], "not JSON"),
        (["[1]"], "not a JSON object"),
        ([{"text": "ab"}, {"text": "b"}], "does not grow"),
        ([{"error": {"message": "it broke", "type": "server_error"}}], "it broke"),
        ([{"error": "it broke"}], "it broke"),
    ],
)
def test_streams_that_end_badly(events, message) -> None:
    with pytest.raises(BackendError, match=message):
        ask_stream(Server(generate=lambda _b: sse(*events)).endpoint())


def envelope(status, message, kind="invalid_request_error", field=None, code=None):
    error = {"message": message, "type": kind, "field": field, "code": code}
    return lambda _body: httpx.Response(status, json={"error": error})


@pytest.mark.parametrize(
    ("route", "kind", "attributes"),
    [
        (
            envelope(400, "sampling_params.top_p: must be at most 1", field="sampling_params.top_p"),
            InvalidRequestError,
            {"field": "sampling_params.top_p", "reason": "must be at most 1"},
        ),
        (
            envelope(400, "regex: no end of group (at position 3)", field="regex", code="constraint_syntax"),
            ConstraintError,
            {"kind": "regex", "code": "syntax", "where": "position 3", "detail": "no end of group"},
        ),
        (
            envelope(400, "regex: too big", field="regex", code="constraint_limit"),
            ConstraintError,
            {"kind": "regex", "code": "limit", "where": "", "detail": "too big"},
        ),
        (envelope(400, "10 tokens can never fit"), CapacityError, {"status": 400}),
        (envelope(503, "the queue is full", "server_error"), CapacityError, {"status": 503}),
        (envelope(429, "slow down", "rate_limit_error"), CapacityError, {"status": 429}),
        (envelope(409, "aborted"), RequestAborted, {}),
        (envelope(500, "internal error", "server_error"), BackendError, {"status": 500}),
        (envelope(401, "who are you?", "authentication_error"), BackendError, {"status": 401}),
        (lambda _b: httpx.Response(502, text="<html>Bad Gateway</html>"), BackendError, {"status": 502}),
        (lambda _b: httpx.Response(400, json=["odd"]), BackendError, {"status": 400}),
        (lambda _b: httpx.Response(404, json={"detail": "Not Found"}), BackendError, {"status": 404}),
    ],
)
@pytest.mark.parametrize("how", [ask, ask_stream])
def test_error_answers_become_the_errors_they_stand_for(route, kind, attributes, how) -> None:
    with pytest.raises(TrellisError) as caught:
        how(Server(generate=route).endpoint())
    assert type(caught.value) is kind
    assert {name: getattr(caught.value, name) for name in attributes} == attributes


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ({"type": "abort", "message": "aborted on request"}, RequestAborted),
        ({"type": "error", "message": "the grammar failed"}, BackendError),
        ({"type": "error", "message": "too long", "status": 400}, InvalidRequestError),
        ({"type": "abort", "message": "full", "status": 503}, CapacityError),
    ],
)
def test_finish_reasons_that_are_no_answers(reason, kind) -> None:
    with pytest.raises(kind, match=reason["message"]):
        ask(Server(generate={**ANSWER, "meta_info": {**META, "finish_reason": reason}}).endpoint())


@pytest.mark.parametrize("answer", [{}, {"text": "a"}, {"text": "a", "meta_info": {}}, {"meta_info": META}])
def test_an_answer_that_is_none(answer) -> None:
    with pytest.raises(BackendError, match="not a /generate answer"):
        ask(Server(generate=answer).endpoint())


def test_text_that_utf8_cannot_say() -> None:
    with pytest.raises(InvalidRequestError, match="UTF-8"):
        ask(Server(generate=ANSWER).endpoint(), GenerateRequest(("\ud800",), SamplingOptions()))


def test_a_base_url_needs_a_scheme() -> None:
    with pytest.raises(BackendError, match="must begin with http"):
        RuntimeEndpoint("127.0.0.1:30000")


# -- programs ------------------------------------------------------------------------------------------------------


def test_a_program_goes_on_from_the_servers_tokens() -> None:
    score = {"options": [{"token_ids": [1], "logprobs": [-2.0]}, {"token_ids": [2], "logprobs": [-1.0]}]}
    chat = {"roles": {"user": ["<u>", "</u>"], "assistant": ["<a>", "</a>"]}}
    server = Server(generate=ANSWER, score=score, get_model_info={"model_path": "m", "chat_format": chat})

    @function
    def program(s):
        s += user("hi") + assistant(gen("x"))
        s += user("sure?") + assistant(select("y", ["yes", "no"]))
        s += gen("z")

    state = program.run(backend=server.endpoint())
    assert state["x"] == "hello world"
    assert state["y"] == "no"
    assert state.text().startswith("<u>hi</u><a>hello world</a><u>sure?</u><a>no</a>")
    prompts = [body["segments"] for _, path, body, _ in server.requests if path != "/get_model_info"]  # type: ignore[index]
    assert prompts[1] == ["<u>hi</u><a>", [5, 6], "ld</a><u>sure?</u><a>"]
    assert prompts[2] == ["<u>hi</u><a>", [5, 6], "ld</a><u>sure?</u><a>no</a>"]


def test_a_server_that_cannot_be_reached_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    program = function(lambda s: s.__iadd__("a" + gen("x")) and None)
    for stream in (False, True):
        with pytest.raises(ProgramError, match=f"cannot reach {url}/generate") as caught:
            program.run(backend=RuntimeEndpoint(url), stream=stream).text()
        assert isinstance(caught.value.__cause__, BackendError)


@contextlib.contextmanager
def raw_server(handle):
    """A TCP server in a thread; ``handle(connection)`` gets each connection after its request was read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.settimeout(20)
                        head = b""
                        while b"\r\n\r\n" not in head:
                            head += connection.recv(65536)
                        handle(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def read_to_the_end(connection):
    """The rest of the request, and then until the client closes (a reset, if it left something unread)."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def http_chunk(event: dict) -> bytes:
    data = f"data: {json.dumps(event)}\n\n".encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_that_is_lost_before_the_answer(stream) -> None:
    program = function(lambda s: s.__iadd__("a" + gen("x")) and None)
    cut = raw_server(lambda connection: connection.shutdown(socket.SHUT_RDWR))
    with cut as url, pytest.raises(ProgramError, match="the connection was lost"):
        program.run(backend=RuntimeEndpoint(url), stream=stream).text()


def test_a_connection_that_is_lost_inside_a_stream() -> None:
    def handle(connection):
        connection.sendall(STREAM_HEAD + http_chunk({"text": "half", "meta_info": {"finish_reason": None}}))
        connection.shutdown(socket.SHUT_RDWR)

    program = function(lambda s: s.__iadd__("a" + gen("x")) and None)
    with raw_server(handle) as url:
        state = program.run(backend=RuntimeEndpoint(url), stream=True)
        seen: list[str] = []
        with pytest.raises(ProgramError, match="the connection was lost"):
            seen.extend(state.text_iter("x"))
        assert seen in ([], ["half"])
        assert state.partial_text() in ("a", "ahalf")


@pytest.mark.parametrize("stream", [False, True])
def test_a_silent_server_ends_with_the_endpoints_timeout(stream) -> None:
    program = function(lambda s: s.__iadd__("a" + gen("x")) and None)
    with (
        raw_server(read_to_the_end) as url,
        pytest.raises(ProgramError, match=r"no answer within 0\.1 s .*longer timeout=.*None.*stream=True"),
    ):
        program.run(backend=RuntimeEndpoint(url, timeout=0.1), stream=stream).text()


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_closes_the_connection(stream) -> None:
    asked, closed = threading.Event(), threading.Event()

    def handle(connection):
        if stream:
            connection.sendall(
                STREAM_HEAD + http_chunk({"text": "half", "meta_info": {"finish_reason": None}})
            )
        asked.set()
        read_to_the_end(connection)
        closed.set()

    @function
    def program(s):
        s += "a" + gen("x")
        assert asked.wait(10)
        s.cancel()

    with raw_server(handle) as url:
        with pytest.raises(ProgramError, match="cancelled"):
            program.run(backend=RuntimeEndpoint(url), stream=stream).text()
        assert closed.wait(10)


def test_closing_is_idempotent_and_the_endpoint_can_be_used_again() -> None:
    server = Server(generate=ANSWER)
    program = function(lambda s: s.__iadd__("a" + gen("x")) and None)
    with server.endpoint() as endpoint:
        assert program.run(backend=endpoint)["x"] == "hello world"
    endpoint.close()
    assert program.run(backend=endpoint)["x"] == "hello world"


# -- servers that are no Trellis server, or a broken one -----------------------------------------------------------


def with_meta(**meta):
    return {**ANSWER, "meta_info": {**META, **meta}}


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("answer", "place"),
    [
        ({**ANSWER, "text": 3}, "text must be text, got 3"),
        ({**ANSWER, "text": None}, "text is missing"),
        ({**ANSWER, "output_ids": "abc"}, "output_ids must be a list"),
        ({**ANSWER, "output_ids": [1, True, 3]}, r"output_ids\[1\] must be an integer"),
        ({**ANSWER, "meta_info": [1]}, "meta_info must be an object"),
        (with_meta(finish_reason="stop"), "meta_info.finish_reason must be an object"),
        (with_meta(finish_reason={"type": ["x"]}), "meta_info.finish_reason.type must be text"),
        (with_meta(finish_reason={"type": "stop", "matched": [1]}), "finish_reason.matched must be"),
        (with_meta(prompt_tokens="x"), "meta_info.prompt_tokens must be an integer"),
        (with_meta(cached_tokens=-1), "meta_info.cached_tokens must be an integer of at least 0"),
        (with_meta(kept_tokens=4), "kept_tokens is 4, but there are 3 output_ids"),
        (with_meta(tail_text="x"), "tail_text 'x' is not the end of the text"),
        (with_meta(output_token_logprobs=[["abc", 1, None]]), r"output_token_logprobs\[0\]\[0\] must be"),
        (with_meta(output_token_logprobs=[[10**400, 1, None]]), r"output_token_logprobs\[0\]\[0\] must be"),
        (with_meta(output_token_logprobs=[[math.nan, 1, None]]), "must be a finite number or null, got nan"),
        (with_meta(output_top_logprobs=[[[0, "q", None]]]), r"output_top_logprobs\[0\]\[0\]\[1\] must be"),
        (with_meta(forced_spans=[[0, 99]]), "forced_spans must be ascending pairs within the text"),
        (with_meta(forced_spans=[[3, 4], [1, 2]]), "forced_spans must be ascending pairs within the text"),
        (with_meta(forced_spans=[[0]]), "forced_spans must be ascending pairs"),
    ],
)
def test_an_answer_with_a_wrong_part_is_a_backend_error_that_names_it(answer, place) -> None:
    text = json.dumps(answer)
    for how, response in (
        (ask, lambda _b: httpx.Response(200, text=text)),
        (ask_stream, lambda _b: sse(text, "[DONE]", cut=4096)),
    ):
        with pytest.raises(BackendError) as caught:
            how(Server(generate=response).endpoint())
        assert str(caught.value).startswith("http://server:1/generate: ")
        if how is ask:
            assert re.search(f"is not a /generate answer: .*{place}", str(caught.value))


@pytest.mark.parametrize("how", [ask, ask_stream])
@pytest.mark.parametrize(
    "response",
    [
        lambda _b: httpx.Response(200, text=DEEP),
        lambda _b: httpx.Response(500, text=DEEP),
        lambda _b: httpx.Response(400, json={"error": {"message": None, "code": 5, "field": [1]}}),
        lambda _b: httpx.Response(400, json={"error": [[1]]}),
        lambda _b: httpx.Response(302, headers={"location": "/elsewhere"}),
        lambda _b: httpx.Response(200, text='{"text": ' + "9" * 5000 + "}"),
        lambda _b: sse(DEEP, cut=65536),
        lambda _b: sse({"error": [1]}),
        lambda _b: sse({"text": "a", "meta_info": [1]}),
        lambda _b: sse({"text": 5, "meta_info": {}}),
    ],
)
def test_nothing_that_a_server_sends_is_another_error(response, how) -> None:
    with pytest.raises(BackendError, match=r"^http://server:1/generate: "):
        how(Server(generate=response).endpoint())


@pytest.mark.parametrize(
    ("answer", "place"),
    [
        ({"options": 3}, "options must be a list"),
        ({"options": [{"token_ids": "abc", "logprobs": [1]}] * 2}, r"options\[0\].token_ids must be a list"),
        ({"options": [{"token_ids": [1], "logprobs": ["x"]}] * 2}, r"options\[0\].logprobs\[0\] must be"),
        (
            {"options": [{"token_ids": [1], "logprobs": []}] * 2},
            r"options\[0\] has 1 token_ids and 0 logprobs",
        ),
        ({"options": []}, "options must have 2 entries, one an option, got 0"),
    ],
)
def test_scores_with_a_wrong_part(answer, place) -> None:
    with pytest.raises(BackendError, match=f"^http://server:1/score: .*{place}"):
        asyncio.run(Server(score=answer).endpoint().score(("a",), ("x", "y")))


@pytest.mark.parametrize(
    ("answer", "place"),
    [
        ({}, "model_path is missing"),
        ({"model_path": "m", "chat_format": []}, "chat_format must be an object"),
        (
            {"model_path": "m", "chat_format": {"roles": {"user": ["a"]}}},
            r"roles.user must be \[prefix, suffix\]",
        ),
        ({"model_path": "m", "chat_format": {"roles": {"user": [1, 2]}}}, r"roles.user\[0\] must be text"),
        ({"model_path": "m", "context_length": "long"}, "context_length must be an integer"),
        (
            {"model_path": "m", "chat_format": {"roles": {}, "turns": [{"then": {"user": 1}}]}},
            r"turns\[0\].then.user is 1, which is no turn of that role",
        ),
        (
            {"model_path": "m", "chat_format": {"roles": {}, "turns": [{"then": {"user": 0}}]}},
            r"turns\[0\].then.user is 0, which is no turn of that role",
        ),
        (
            {"model_path": "m", "chat_format": {"roles": {}, "turns": [{"strips": "up"}]}},
            r"turns\[0\].strips must be one of '', 'left', 'right', 'both', got 'up'",
        ),
        ({"model_path": "m", "chat_format": {"roles": {}, "stop": ["a", 1]}}, r"stop\[1\] must be text"),
    ],
)
def test_model_info_with_a_wrong_part(answer, place) -> None:
    with pytest.raises(BackendError, match=f"^http://server:1/get_model_info: .*{place}"):
        asyncio.run(Server(get_model_info=answer).endpoint().model_info())


def test_an_event_that_never_ends_is_a_backend_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "SSEParser", lambda: SSEParser(max_event=1000))
    server = Server(generate=lambda _b: sse("x" * 2000))
    with pytest.raises(BackendError, match=r"^http://server:1/generate: .*without the end of an event"):
        ask_stream(server.endpoint())


@pytest.mark.parametrize("how", [ask, ask_stream])
def test_errors_of_http_name_the_url_and_what_may_be_wrong_with_it(how) -> None:
    missing = httpx.Response(404, json={"detail": "Not Found"})
    with pytest.raises(
        BackendError, match=r"is this a Trellis server. give its base URL, without /v1"
    ) as caught:
        how(Server(generate=lambda _b: missing).endpoint())
    assert str(caught.value).startswith("http://server:1/generate: HTTP 404: ")
    for route in (envelope(500, "it broke", "server_error"), envelope(503, "full"), envelope(409, "aborted")):
        with pytest.raises(TrellisError, match=r"^http://server:1/generate: "):
            how(Server(generate=route).endpoint())


@pytest.mark.parametrize(
    ("field", "named"),
    [("segments", "prompt"), ("segments[0][3]", "prompt[0][3]"), ("segments_x", "segments_x")],
)
def test_a_mistake_in_the_prompt_is_named_as_the_language_names_it(field, named) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ask(Server(generate=envelope(400, f"{field}: is bad", field=field)).endpoint())
    assert (caught.value.field, caught.value.reason) == (named, "is bad")


def test_a_gen_before_any_text_is_told_to_append_some() -> None:
    route = envelope(400, "segments: is empty; a prompt must have at least one token", field="segments")
    program = function(lambda s: s.__iadd__(gen("x")) and None)
    with pytest.raises(ProgramError, match=r"prompt: is empty.*; append text before the first gen"):
        program.run(backend=Server(generate=route).endpoint())


@pytest.mark.parametrize("stream", [False, True])
def test_the_trace_of_a_lost_connection_holds_nothing_of_the_http_client(stream) -> None:
    with raw_server(lambda connection: connection.shutdown(socket.SHUT_RDWR)) as url:
        program = function(lambda s: s.__iadd__("a" + gen("x")) and None)
        with pytest.raises(ProgramError) as caught:
            program.run(backend=RuntimeEndpoint(url), stream=stream).text()
    trace = "".join(traceback.format_exception(caught.value))
    assert "the connection was lost" in trace
    assert "httpcore" not in trace


def test_what_was_forced_comes_with_the_answer() -> None:
    spans = {"forced_spans": [[0, 6], [7, 11]]}
    for how, route in (
        (ask, with_meta(**spans)),
        (lambda e: ask_stream(e)[-1].final, lambda _b: sse(with_meta(**spans), "[DONE]")),
    ):
        assert how(Server(generate=route).endpoint()).forced_spans == ((0, 6), (7, 11))
