"""Reading a request's JSON, and answering for as long as the client is there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from trellis.errors import InvalidRequestError
from trellis.runtime.server.errors import ClientDisconnected

BODY_LIMIT = 32 << 20  # bytes
SMALL_BODY = 8_192  # bytes; reading more would be felt by everybody else on the event loop
T = TypeVar("T")
_SURROGATE = re.compile(rb"\\u([dD][89a-fA-F][0-9a-fA-F]{2})")


async def read_json(request: Request) -> Any:
    """The body as JSON. Raises InvalidRequestError (400) or HTTPException (413, 415)."""
    return await read(request, lambda raw: raw)


async def read(
    request: Request, parse: Callable[[Any], T], takes_long: Callable[[Any], bool] = lambda _: False
) -> T:
    """What ``parse`` makes of the body's JSON. Raises what it raises, and as ``read_json``.

    A large body is decoded and parsed in a thread; so is a small one if ``takes_long`` says so of its JSON.
    """
    body = await _bytes(request)
    if len(body) > SMALL_BODY:
        return await asyncio.to_thread(lambda: parse(_decoded(body)))
    raw = _decoded(body)
    return await asyncio.to_thread(parse, raw) if takes_long(raw) else parse(raw)


async def _bytes(request: Request) -> bytearray:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    # Other types are refused for the sake of browsers: a page of another origin may send those without asking.
    if kind != "application/json" and not kind.endswith("+json"):
        raise HTTPException(415, f"content-type must be application/json, not {kind[:100]}")
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > BODY_LIMIT:
                raise HTTPException(413, f"the body is over the limit of {BODY_LIMIT} bytes")
    except ClientDisconnect as error:
        raise ClientDisconnected("the client left before its request was complete") from error
    return body


def _decoded(body: bytearray) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = _lone_surrogate(body, str(error)) or str(error)
        raise InvalidRequestError("body", f"is not valid JSON: {reason}") from error


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; if the client leaves first, cancel it and raise ClientDisconnected.

    The body of the request must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected("the client is gone")
        return task.result()
    finally:
        await _cancel(task, gone)


class EventStream(Response):
    """Server-sent events; ``events`` is closed, which aborts its requests, as soon as the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await _cancel(sending, gone)

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(data: Any) -> bytes:
    """One server-sent event with JSON data."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def _lone_surrogate(body: bytearray, complaint: str) -> str | None:
    """The parser's complaint in clearer words, if it is about half a surrogate pair.

    It complains at the end of an escape that should have been the other half, or of the text if that ends first.
    """
    place = re.search(r"surrogate pair \(byte (\d+)\)", complaint)
    if place is None and "truncated" not in complaint:
        return None
    end = int(place[1]) if place else len(body)
    start = max(end - 12, 0)
    found = [(start + each.start(), int(each[1], 16)) for each in _SURROGATE.finditer(body[start:end])]
    if place is None:
        found = [each for each in found[-1:] if each[1] < 0xDC00]
    elif len(found) > 1 and found[0][1] >= 0xDC00:
        del found[0]  # the end of the pair before
    return f"lone surrogate \\u{found[0][1]:04x} at byte {found[0][0]}" if found else None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs, and wait until its cleaning up is done."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
