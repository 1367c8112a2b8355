"""A Trellis server, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trellis.chat_format import ChatFormat
from trellis.chat_templates import chat_format_of
from trellis.errors import BackendError, InvalidRequestError, TrellisError
from trellis.frontend.backends import answers, wire
from trellis.frontend.backends.base import (
    Backend,
    Chunk,
    Completion,
    GenerateRequest,
    ModelInfo,
    ScoreResult,
    Segment,
)
from trellis.frontend.backends.errors import error_from, error_of
from trellis.frontend.backends.shown import shown
from trellis.frontend.backends.sse import EventTooLong, SSEParser

if TYPE_CHECKING:
    import httpx

_CONNECT_TIMEOUT = 10.0  # seconds


@dataclass(frozen=True)
class _Connection:
    """A client belongs to the event loop that it was made in."""

    loop: asyncio.AbstractEventLoop
    client: httpx.AsyncClient


class RuntimeEndpoint(Backend):
    """``RuntimeEndpoint("http://127.0.0.1:30000")``.

    base_url: without /v1. api_key: sent as a bearer token. timeout: seconds without a byte from the server until a
    request fails (a gen that is not streamed is silent until it is done); None waits for ever. max_connections: requests beyond it
    wait for a free connection. resends: how often a request is sent again when no connection came about, or when the
    server refused it with 503 and Retry-After; once it has begun to answer, never. chat_template: the name of one (see
    ``get_chat_template``) or a ``ChatFormat``, instead of the model's own. transport: an httpx transport, for tests.

    Nothing is sent until the first request. Cancelling one closes its connection, and the server then aborts it.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        timeout: float | None = 600.0,
        *,
        max_connections: int = 256,
        resends: int = 3,
        chat_template: str | ChatFormat | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        if not self.base_url.startswith(("http://", "https://")):
            raise BackendError(f"base_url must begin with http:// or https://, got {base_url!r}")
        self._api_key = api_key
        self._timeout = timeout
        self._max_connections = max_connections
        self._resends = resends
        self._transport = transport
        self._connection: _Connection | None = None
        self._chat = chat_format_of(chat_template)
        self._info: ModelInfo | None = None

    async def model_info(self) -> ModelInfo:
        if self._info is None:
            path = "/get_model_info"
            info = answers.model_info(await self._json("GET", path), self.base_url + path)
            self._info = info if self._chat is None else replace(info, chat_format=self._chat)
        return self._info

    async def generate(self, request: GenerateRequest) -> Completion:
        answer = await self._json("POST", "/generate", wire.generate_body(request, stream=False))
        return answers.completion(answer, self.base_url + "/generate")

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async with contextlib.aclosing(self.stream_samples(request, 1)) as chunks:
            async for _, chunk in chunks:
                yield chunk

    async def samples(self, request: GenerateRequest, n: int) -> list[Completion]:
        """One request for all; the server computes the prompt once."""
        if n == 1:
            return [await self.generate(request)]
        body = wire.generate_body(request, stream=False, n=n)
        content = await self._request("POST", "/generate", body)
        return answers.completions(self._loaded("/generate", content), self.base_url + "/generate", n)

    async def stream_samples(
        self, request: GenerateRequest, n: int
    ) -> AsyncGenerator[tuple[int, Chunk], None]:
        url = self.base_url + "/generate"
        so_far, complete = [""] * n, [False] * n
        last: list[dict[str, Any] | None] = [None] * n
        body = wire.generate_body(request, stream=True, n=n)
        async with contextlib.aclosing(self._events(body)) as events:
            async for answer in events:
                if "error" in answer:
                    raise error_of(answer["error"], url)
                i = answers.sample_index(answer, url, n) if n > 1 else 0
                text, complete[i] = answers.progress(answer, url)
                if not text.startswith(so_far[i]):
                    raise BackendError(
                        f"{url}: streamed text does not grow: {shown(so_far[i])}, then {shown(text)}"
                    )
                if len(text) > len(so_far[i]):
                    yield i, Chunk(text[len(so_far[i]) :])
                so_far[i], last[i] = text, answer
        if not all(complete):
            raise BackendError(f"{url}: the stream ended before the answer was complete")
        for i in range(n):
            yield i, Chunk("", answers.completion(last[i], url))

    async def score(self, prompt: tuple[Segment, ...], options: Sequence[str]) -> ScoreResult:
        return await self._score(prompt, options, {})

    async def score_unconditionally(self, prompt: tuple[Segment, ...], options: Sequence[str]) -> ScoreResult:
        return await self._score(prompt, options, {"unconditional": True})

    async def _score(
        self, prompt: tuple[Segment, ...], options: Sequence[str], more: dict[str, Any]
    ) -> ScoreResult:
        body = {"segments": wire.segments(prompt), "options": list(options), **more}
        answer = await self._json("POST", "/score", body)
        return answers.score_result(answer, self.base_url + "/score", len(options))

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

            from trellis.frontend.backends.resend import ResendingClient

            # Idle connections are dropped before the server drops them (uvicorn: after 5 s), so that no request is
            # sent into a connection that is just being closed.
            limits = httpx.Limits(
                max_connections=self._max_connections,
                max_keepalive_connections=self._max_connections,
                keepalive_expiry=2.0,
            )
            client = ResendingClient(
                self._resends,
                headers={"Authorization": f"Bearer {self._api_key}"} if self._api_key else {},
                timeout=httpx.Timeout(self._timeout, connect=_CONNECT_TIMEOUT, pool=None),
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
            # The client's own trace is 50 lines of its inner workings, and the reason says all of it.
            raise self._lost(path, error) from None
        if answer.status_code >= 300:
            raise error_from(answer.status_code, answer.content, self.base_url + path)
        return answer.content

    async def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        return self._parsed(path, await self._request(method, path, body))

    async def _events(self, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON of each event of a streamed ``/generate``, up to ``[DONE]``."""
        import httpx

        parser, path = SSEParser(), "/generate"
        try:
            async with self._client().stream("POST", self.base_url + path, json=body) as answer:
                if answer.status_code >= 300:
                    raise error_from(answer.status_code, await answer.aread(), self.base_url + path)
                async for chunk in answer.aiter_raw():
                    for data in parser.feed(chunk):
                        if data == "[DONE]":
                            return
                        yield self._parsed(path, data)
        except EventTooLong as error:
            raise BackendError(f"{self.base_url}{path}: {error}") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, UnicodeEncodeError) as error:
            raise self._lost(path, error) from None

    def _loaded(self, path: str, content: bytes | str) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError):  # the latter: brackets in brackets, without end
            reason = f"the answer is not JSON: {shown(content[:200], 200)}"
            raise BackendError(f"{self.base_url}{path}: {reason}") from None

    def _parsed(self, path: str, content: bytes | str) -> dict[str, Any]:
        parsed = self._loaded(path, content)
        if not isinstance(parsed, dict):
            reason = f"the answer is not a JSON object: {shown(parsed, 200)}"
            raise BackendError(f"{self.base_url}{path}: {reason}")
        return parsed

    def _lost(self, path: str, error: Exception) -> TrellisError:
        import httpx

        if isinstance(error, UnicodeEncodeError):
            return InvalidRequestError("prompt", f"has text that UTF-8 cannot say: {error}")
        url = self.base_url + path
        reason = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError):
            return BackendError(f"cannot reach {url}: {reason}; is the server running?")
        if isinstance(error, httpx.ConnectTimeout):
            return BackendError(f"cannot reach {url}: no connection within {_CONNECT_TIMEOUT:g} s")
        if isinstance(error, httpx.TimeoutException):
            return BackendError(
                f"{url}: no answer within {self._timeout:g} s ({type(error).__name__}); give RuntimeEndpoint a "
                "longer timeout=... (None waits for ever), or run with stream=True, where every token is an answer"
            )
        return BackendError(f"{url}: the connection was lost: {type(error).__name__}: {reason}")
