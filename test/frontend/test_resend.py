"""A request is sent again only where the server has not begun to work on it."""

from __future__ import annotations

import asyncio
import email.utils
import json
from types import SimpleNamespace

import httpx
import pytest

from trellis.errors import BackendError, CapacityError, ProgramError
from trellis.frontend import RuntimeEndpoint, function, gen
from trellis.frontend.backends import resend

ANSWER = {
    "text": "hello",
    "output_ids": [5],
    "meta_info": {"finish_reason": {"type": "stop"}, "kept_tokens": 1, "prompt_tokens": 1},
}
REFUSED = {"error": {"message": "the queue is full", "type": "server_error"}}


@function
def program(s):
    s += "a" + gen("x")


class Script(httpx.AsyncBaseTransport):
    """Does one thing a request, in order, and keeps the bodies that were sent."""

    def __init__(self, *things) -> None:
        self.things = list(things)
        self.bodies: list[object] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(await request.aread()))
        thing = self.things.pop(0)
        if isinstance(thing, Exception):
            raise thing
        return thing


def refused(after: str | None = "0", status: int = 503) -> httpx.Response:
    return httpx.Response(status, json=REFUSED, headers={} if after is None else {"Retry-After": after})


def answered(stream: bool) -> httpx.Response:
    if not stream:
        return httpx.Response(200, json=ANSWER)

    async def events():
        yield f"data: {json.dumps(ANSWER)}\n\ndata: [DONE]\n\n".encode()

    return httpx.Response(200, content=events())


def run(script: Script, stream: bool = False, **options) -> str:
    state = program.run(backend=RuntimeEndpoint("http://x", transport=script, **options), stream=stream)
    return state["x"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "trouble",
    [
        lambda: httpx.ConnectError("refused"),
        lambda: httpx.ConnectTimeout("late"),
        refused,
        lambda: refused(email.utils.format_datetime(email.utils.localtime())),
    ],
    ids=["connect", "connect-timeout", "503", "503-date"],
)
def test_what_was_not_begun_is_sent_again(trouble, stream) -> None:
    script = Script(trouble(), trouble(), answered(stream))
    assert run(script, stream) == "hello"
    assert len(script.bodies) == 3
    assert script.bodies[0] == script.bodies[1] == script.bodies[2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "trouble",
    [
        lambda: httpx.ReadError("lost"),
        lambda: httpx.RemoteProtocolError("disconnected"),
        lambda: httpx.ReadTimeout("late"),
        lambda: refused(None),
        lambda: refused("3600"),
        lambda: refused("soon"),
        lambda: refused("0", status=500),
        lambda: refused("0", status=429),
    ],
    ids=["read", "protocol", "read-timeout", "503-bare", "503-long", "503-odd", "500", "429"],
)
def test_what_may_have_been_begun_is_sent_once(trouble, stream) -> None:
    script = Script(trouble(), answered(stream))
    with pytest.raises(ProgramError, match="variable 'x'"):
        run(script, stream)
    assert len(script.bodies) == 1


def test_a_stream_that_breaks_is_not_sent_again() -> None:
    async def half():
        event = {"text": "he", "meta_info": {"finish_reason": None}}
        yield f"data: {json.dumps(event)}\n\n".encode()
        raise httpx.ReadError("lost")

    script = Script(httpx.Response(200, content=half()), answered(True))
    with pytest.raises(ProgramError, match="connection was lost"):
        run(script, stream=True)
    assert len(script.bodies) == 1


def test_the_number_of_resends_is_bounded_and_the_last_error_is_the_one_that_counts() -> None:
    script = Script(*(refused() for _ in range(9)))
    with pytest.raises(ProgramError, match="the queue is full") as caught:
        run(script)
    assert isinstance(caught.value.__cause__, CapacityError)
    assert len(script.bodies) == 4
    script = Script(httpx.ConnectError("refused"))
    with pytest.raises(ProgramError, match="is the server running") as caught:
        run(script, resends=0)
    assert isinstance(caught.value.__cause__, BackendError)


def test_a_cancelled_request_is_not_sent_again() -> None:
    script = Script(refused("20"), answered(False))

    async def main():
        task = asyncio.create_task(program.run_async(backend=RuntimeEndpoint("http://x", transport=script)))
        while not script.bodies:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert len(script.bodies) == 1
    assert len(script.things) == 1


def test_the_wait_that_a_server_asks_for(monkeypatch) -> None:
    now = 1_800_000_000
    monkeypatch.setattr(resend, "time", SimpleNamespace(time=lambda: float(now)))
    assert resend.retry_after(refused(email.utils.formatdate(now + 10, usegmt=True))) == 10
    assert resend.retry_after(refused(email.utils.formatdate(now - 99, usegmt=True))) == 0
    assert resend.retry_after(refused("7")) == 7
    assert resend.retry_after(refused("31")) is None
