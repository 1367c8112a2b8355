"""Clients that leave, keys, and what the application does about them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from trellis.runtime.server.app import create_app
from trellis.runtime.server.http import HttpServer
from trellis.runtime.server.listen import bind


class Connection:
    """One request over bare ASGI, so that the client can leave in the middle."""

    def __init__(self, app: Any, path: str, body: Any) -> None:
        self.sent: list[Any] = []
        self.left = asyncio.Event()
        self.requests = [{"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
            "root_path": "",
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self.requests:
            return self.requests.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true")


REQUESTS = [
    ("/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 150}}),
    ("/generate", {"text": ["ab", "cd"], "sampling_params": {"max_new_tokens": 150}}),
    ("/v1/completions", {"prompt": "ab", "max_tokens": 150, "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_answer_aborts_its_requests(
    engine: Any, scheduler: Any, path: str, body: Any, stream: bool
) -> None:
    async def run() -> None:
        scheduler.gate.clear()
        connection = Connection(create_app(engine), path, {**body, "stream": stream})
        await until(lambda: scheduler.running)
        connection.left.set()
        await asyncio.wait_for(asyncio.gather(connection.task, return_exceptions=True), 30)
        await until(lambda: not scheduler.running)

    asyncio.run(run())
    assert engine.manager.in_flight == 0


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_client_that_leaves_in_the_middle_of_a_stream_aborts_its_requests(
    engine: Any, scheduler: Any, path: str, body: Any
) -> None:
    async def run() -> Connection:
        real_step, steps = scheduler.step, 0

        def step() -> list[Any]:
            nonlocal steps
            steps += 1
            if steps == 5:
                scheduler.gate.clear()
            return real_step()

        scheduler.step = step
        connection = Connection(create_app(engine), path, {**body, "stream": True})
        await until(lambda: connection.bodies() and not scheduler.gate.is_set())
        connection.left.set()
        await asyncio.wait_for(connection.task, 30)
        await until(lambda: not scheduler.running)
        return connection

    connection = asyncio.run(run())
    assert engine.manager.in_flight == 0
    assert b"[DONE]" not in b"".join(connection.bodies())


def test_a_client_that_leaves_during_a_score_aborts_it(engine: Any, scheduler: Any) -> None:
    async def run() -> None:
        scheduler.gate.clear()
        connection = Connection(create_app(engine), "/score", {"text": "ab", "options": ["x", "y"]})
        await until(lambda: len(scheduler.running) == 2)
        connection.left.set()
        await asyncio.wait_for(asyncio.gather(connection.task, return_exceptions=True), 30)
        await until(lambda: not scheduler.running)

    asyncio.run(run())
    assert engine.manager.in_flight == 0


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/score", "/abort_request"])
def test_a_client_that_leaves_during_the_upload_is_no_error(
    engine: Any, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    async def run() -> Connection:
        connection = Connection(create_app(engine), path, None)
        connection.requests[0] = {"type": "http.request", "body": b'{"text": "a', "more_body": True}
        connection.left.set()
        await asyncio.wait_for(connection.task, 30)
        return connection

    connection = asyncio.run(run())
    assert connection.sent[0]["status"] == 499  # nobody reads it
    assert not caplog.records


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_signal_handler_takes_no_lock(number: signal.Signals) -> None:
    lock, taken = threading.Lock(), []
    server = HttpServer(FastAPI(), "info", lambda: taken.append(lock.acquire(timeout=1)))

    async def run() -> None:
        serving = asyncio.ensure_future(server.serve(sockets=[bind("127.0.0.1", 0)]))
        await until(lambda: server.started)
        with lock:  # the signal interrupts the thread just while it holds the lock
            os.kill(os.getpid(), number)
            while not server.should_exit:
                pass
            assert taken == []
        await serving

    asyncio.run(run())
    assert taken == [True]


def test_the_bearer_key(engine_with: Any) -> None:
    async def ask(app: Any, path: str, key: str | None) -> httpx.Response:
        headers = {} if key is None else {"authorization": key}
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers=headers)

    with engine_with(api_key="sesame") as engine:
        app = create_app(engine)
        for wrong in (
            None,
            "sesame",
            "Bearer",
            "Bearer other",
            "Bearer sesam",
            "Bearer sesame2",
            "Basic sesame",
        ):
            for path in ("/v1/models", "/generate", "/server_info", "/nothing"):
                response = asyncio.run(ask(app, path, wrong))
                assert response.status_code == 401
                assert response.json()["error"]["type"] == "authentication_error"
                assert response.headers["www-authenticate"] == "Bearer"
        assert asyncio.run(ask(app, "/v1/models", "Bearer sesame")).status_code == 200
        assert asyncio.run(ask(app, "/health", None)).status_code == 200
