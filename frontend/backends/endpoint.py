"""A Trellis server, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trellis.errors import BackendError, InvalidRequestError, TrellisError
from trellis.frontend.backends import wire
from trellis.frontend.backends.base import (
    Backend,
    Chunk,
    Completion,
    GenerateRequest,
    ModelInfo,
    ScoreResult,
    Segment,
)
from trellis.frontend.backends.sse import SSEParser

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True)
class _Connection:
    """A client belongs to the event loop that it was made in."""

    loop: asyncio.AbstractEventLoop
    client: httpx.AsyncClient


class RuntimeEndpoint(Backend):
    """``RuntimeEndpoint("http://127.0.0.1:30000")``.

    api_key: sent as a bearer token. timeout: seconds without a byte from the server until a request fails (a gen
    that is not streamed is silent until it is done); None waits for ever. max_connections: requests beyond it
    wait for a free connection. transport: an httpx transport, for tests.

    Nothing is sent until the first request. Requests are never sent twice. Cancelling one closes its connection,
    and the server then aborts it.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        timeout: float | None = 600.0,
        *,
        max_connections: int = 256,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        if not self.base_url.startswith(("http://", "https://")):
            raise BackendError(f"base_url must begin with http:// or https://, got {base_url!r}")
        self._api_key = api_key
        self._timeout = timeout
        self._max_connections = max_connections
        self._transport = transport
        self._connection: _Connection | None = None
        self._info: ModelInfo | None = None

    async def model_info(self) -> ModelInfo:
        if self._info is None:
            self._info = wire.model_info(await self._json("GET", "/get_model_info"))
        return self._info

    async def generate(self, request: GenerateRequest) -> Completion:
        return wire.completion(
            await self._json("POST", "/generate", wire.generate_body(request, stream=False))
        )

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        shown = ""
        last: dict[str, Any] | None = None
        async with contextlib.aclosing(self._events(wire.generate_body(request, stream=True))) as events:
            async for answer in events:
                if "error" in answer:
                    error = answer["error"]
                    raise wire.error_of(error if isinstance(error, dict) else {"message": str(error)})
                text = answer.get("text", "")
                if not text.startswith(shown):
                    raise BackendError(
                        f"{self.base_url}: streamed text does not grow: {shown!r}, then {text!r}"
                    )
                if len(text) > len(shown):
                    yield Chunk(text[len(shown) :])
                shown, last = text, answer
        if last is None or not (last.get("meta_info") or {}).get("finish_reason"):
            raise BackendError(f"{self.base_url}: the stream ended before the answer was complete")
        yield Chunk("", wire.completion(last))

    async def score(self, prompt: tuple[Segment, ...], options: Sequence[str]) -> ScoreResult:
        body = {"segments": wire.segments(prompt), "options": list(options)}
        return wire.score_result(await self._json("POST", "/score", body))

    async def flush_cache(self) -> None:
        await self._request("POST", "/flush_cache")

    async def server_info(self) -> dict[str, object]:
        return await self._json("GET", "/server_info")

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None or connection.loop.is_closed():
            return
        closing = connection.client.aclose()
        try:
            asyncio.run_coroutine_threadsafe(closing, connection.loop)
        except RuntimeError:  # the loop closed meanwhile, and its sockets with it
            closing.close()

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._connection is None or self._connection.loop is not loop:
            import httpx

            # Idle connections are dropped before the server drops them (uvicorn: after 5 s), so that no request is
            # sent into a connection that is just being closed.
            limits = httpx.Limits(
                max_connections=self._max_connections,
                max_keepalive_connections=self._max_connections,
                keepalive_expiry=2.0,
            )
            client = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {self._api_key}"} if self._api_key else {},
                timeout=httpx.Timeout(self._timeout, connect=10.0, pool=None),
                limits=limits,
                transport=self._transport,
            )
            self._connection = _Connection(loop, client)
        return self._connection.client

    async def _request(self, method: str, path: str, body: Any = None) -> bytes:
        import httpx

        try:
            answer = await self._client().request(method, self.base_url + path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
            raise self._lost(path, error) from error
        if answer.status_code >= 400:
            raise wire.error_from(answer.status_code, answer.content)
        return answer.content

    async def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        return self._parsed(path, await self._request(method, path, body))

    async def _events(self, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON of each event of a streamed ``/generate``, up to ``[DONE]``."""
        import httpx

        parser, path = SSEParser(), "/generate"
        try:
            async with self._client().stream("POST", self.base_url + path, json=body) as answer:
                if answer.status_code >= 400:
                    raise wire.error_from(answer.status_code, await answer.aread())
                async for chunk in answer.aiter_raw():
                    for data in parser.feed(chunk):
                        if data == "[DONE]":
                            return
                        yield self._parsed(path, data)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, UnicodeEncodeError) as error:
            raise self._lost(path, error) from error

    def _parsed(self, path: str, content: bytes | str) -> dict[str, Any]:
        try:
            parsed = json.loads(content)
        except ValueError as error:
            shown = content[:200]
            raise BackendError(f"{self.base_url}{path}: the answer is not JSON: {shown!r}") from error
        if not isinstance(parsed, dict):
            raise BackendError(f"{self.base_url}{path}: the answer is not a JSON object: {parsed!r:.200}")
        return parsed

    def _lost(self, path: str, error: Exception) -> TrellisError:
        import httpx

        if isinstance(error, UnicodeEncodeError):
            return InvalidRequestError("prompt", f"has text that UTF-8 cannot say: {error}")
        url = self.base_url + path
        reason = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError):
            return BackendError(f"cannot reach {url}: {reason}; is the server running?")
        if isinstance(error, httpx.TimeoutException):
            return BackendError(f"{url}: no answer within {self._timeout} s ({type(error).__name__})")
        return BackendError(f"{url}: the connection was lost: {type(error).__name__}: {reason}")
