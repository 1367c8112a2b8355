"""A server of any JSON API that answers what a test says, over real sockets; and answers to say."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass(frozen=True)
class Reply:
    """body: JSON, or events of a stream (strings as they are sent). hangs: nothing comes after the body, but the
    connection stays open."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    hangs: bool = False


@dataclass(frozen=True)
class Received:
    path: str
    body: Any
    headers: Mapping[str, str]


class FakeAPI:
    """replies: in the order of the requests; the last one stays. requests: what came. closed: set when a client closes
    a connection whose answer hangs."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.requests: list[Received] = []
        self.closed = threading.Event()
        self.asked = threading.Event()
        self._lock = threading.Lock()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                api._answer(self)

            do_GET = do_POST

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def reply(self, *bodies: Any, **more: Any) -> None:
        """Answer the next requests with these bodies; a list is a stream of events."""
        self.replies += [Reply(body, **more) for body in bodies]

    def hang(self, *events: str) -> None:
        """The next answer begins with these events, and then nothing more comes."""
        self.replies.append(Reply(list(events), hangs=True))

    @property
    def bodies(self) -> list[Any]:
        return [request.body for request in self.requests]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        size = int(handler.headers.get("content-length") or 0)
        body = json.loads(handler.rfile.read(size)) if size else None
        with self._lock:
            self.requests.append(
                Received(handler.path, body, {name.lower(): value for name, value in handler.headers.items()})
            )
            reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        self.asked.set()
        streamed = isinstance(reply.body, list)
        handler.send_response(reply.status)
        for name, value in reply.headers.items():
            handler.send_header(name, value)
        if streamed or reply.hangs:
            handler.send_header("content-type", "text/event-stream")
            handler.send_header("connection", "close")
            handler.end_headers()
            for event in reply.body if streamed else []:
                handler.wfile.write(event.encode())
                handler.wfile.flush()
            if reply.hangs:
                with contextlib.suppress(ConnectionError):
                    handler.connection.recv(1)  # returns, or raises, when the client has gone
                self.closed.set()
            handler.close_connection = True
            return
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


class Answers:
    """Bodies as the APIs send them."""

    @staticmethod
    def events(chunks: Sequence[Any]) -> list[str]:
        """Server-sent events of OpenAI."""
        return [*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"]

    @staticmethod
    def named_events(chunks: Sequence[Any]) -> list[str]:
        """Server-sent events of Anthropic."""
        return [f"event: {chunk['type']}\ndata: {json.dumps(chunk)}\n\n" for chunk in chunks]

    @staticmethod
    def chat(
        *texts: str | None, finish: str = "stop", logprobs: Any = None, **message: Any
    ) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": text, **message},
                "finish_reason": finish,
                "logprobs": logprobs,
            }
            for i, text in enumerate(texts)
        ]
        envelope = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
        return {**envelope, "choices": choices, "usage": USAGE}

    @staticmethod
    def chat_chunks(*texts: str, finish: str | None = "stop") -> list[dict[str, Any]]:
        """The chunks of a chat completion, the usage last."""
        envelope = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}

        def chunk(delta: dict[str, Any], end: str | None) -> dict[str, Any]:
            return {**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}

        parts = [chunk({"content": text}, None) for text in texts]
        ends = [chunk({}, finish)] if finish else []
        return [*parts, *ends, {**envelope, "choices": [], "usage": USAGE}]

    @staticmethod
    def completion(*texts: str, finish: str = "stop", logprobs: Sequence[Any] = ()) -> dict[str, Any]:
        """logprobs: of each choice."""
        choices = [
            {
                "index": i,
                "text": text,
                "finish_reason": finish,
                "logprobs": logprobs[i] if logprobs else None,
            }
            for i, text in enumerate(texts)
        ]
        envelope = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
        return {**envelope, "choices": choices, "usage": USAGE}


@pytest.fixture
def answers() -> type[Answers]:
    return Answers


@pytest.fixture
def api() -> Iterator[FakeAPI]:
    server = FakeAPI()
    yield server
    server.stop()
