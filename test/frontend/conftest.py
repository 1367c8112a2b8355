from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trellis.errors import BackendError
from trellis.frontend import MockBackend, set_default_backend
from trellis.frontend.backends.base import Chunk, Completion, ScoreResult
from trellis.frontend.defaults import DEFAULTS


@pytest.fixture(autouse=True)
def no_default_backend() -> Iterator[None]:
    """Every test begins and ends without a default backend."""
    set_default_backend(None)
    yield
    set_default_backend(None)


@pytest.fixture
def assert_settled() -> Callable[[MockBackend], None]:
    """Call it at the end: no operation of any state and no request of the backend may be left."""

    def check(backend: MockBackend) -> None:
        deadline = time.monotonic() + 10
        while (DEFAULTS.loop.running_tasks or backend.active) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert DEFAULTS.loop.running_tasks == 0
        assert backend.active == 0

    return check


class FaultyBackend(MockBackend):
    """A mock whose operation number ``at`` goes wrong. Operations are calls of model_info, generate, stream and score,
    in the order in which they come; ``operations`` is how many have come, and ``hit`` is set once it was the one.

    fault: ``error`` raises CAUSE; ``hang`` never answers; ``disconnect`` raises CAUSE when the answer has begun (a
    stream has shown its first word by then); ``cut`` ends the stream there without a word; ``slow`` waits, then
    answers; ``nothing`` and ``garbage`` answer with None and with what is no answer to this request.
    """

    CAUSE = BackendError("the real cause")
    SECONDS = 0.03

    def __init__(self, at: int, fault: str) -> None:
        super().__init__("mock answer")
        self._at = at
        self._fault = fault
        self.operations = 0
        self.hit = threading.Event()

    async def _go_wrong(self) -> bool:
        """Whether this operation is the one; raises or waits where that is the fault."""
        operation, self.operations = self.operations, self.operations + 1
        await asyncio.sleep(0)
        if operation != self._at:
            return False
        self.hit.set()
        if self._fault == "error":
            raise self.CAUSE
        if self._fault == "hang":
            await asyncio.Event().wait()
        if self._fault == "slow":
            await asyncio.sleep(self.SECONDS)
        return self._fault != "slow"

    async def model_info(self) -> Any:
        if await self._go_wrong():
            return self._wrong("a model")
        return await super().model_info()

    async def generate(self, request: Any) -> Any:
        self.active += 1
        try:
            if await self._go_wrong():
                return self._wrong({"text": "mock"})
        finally:
            self.active -= 1
        return await super().generate(request)

    async def stream(self, request: Any) -> Any:
        self.active += 1
        try:
            wrong = await self._go_wrong()
            if wrong and self._fault in ("disconnect", "cut"):
                yield Chunk("mock")
            if wrong and self._fault != "cut":
                yield self._wrong(Chunk("mock", Completion("something else")))
        finally:
            self.active -= 1
        if wrong:
            return
        async for chunk in super().stream(request):
            yield chunk

    async def score(self, prompt: Any, options: Any) -> Any:
        if await self._go_wrong():
            return self._wrong(ScoreResult(()))
        return await super().score(prompt, options)

    def _wrong(self, garbage: Any) -> Any:
        if self._fault in ("disconnect", "cut"):
            raise self.CAUSE
        return None if self._fault == "nothing" else garbage


@pytest.fixture
def faulty() -> type[FaultyBackend]:
    return FaultyBackend


sys.path.insert(0, str(Path(__file__).parent))  # the tests of this folder import ``languages``
_MODEL, _SERVER = pytest.mark.model, pytest.mark.server


@pytest.fixture(
    params=[
        "mock",
        pytest.param("engine", marks=_MODEL),
        pytest.param("endpoint", marks=[_MODEL, _SERVER]),
        pytest.param("openai", marks=[_MODEL, _SERVER]),
    ],
    scope="module",
)
def language(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Every backend that the language tests run on: see ``languages.Language``. A new one has its line above and its
    place below."""
    from languages import Language, mock_language

    if request.param == "mock":
        yield mock_language()
    elif request.param == "engine":
        yield Language("engine", request.getfixturevalue("engine"))
    elif request.param == "endpoint":
        from trellis import RuntimeEndpoint

        with RuntimeEndpoint(request.getfixturevalue("server_url")) as backend:
            yield Language("endpoint", backend)
    else:
        pytest.importorskip("openai")
        from trellis import OpenAI

        url = request.getfixturevalue("server_url") + "/v1"
        with OpenAI("smollm2-135m", url, api="completions", dialect="trellis") as backend:
            yield Language("openai", backend, tells_stats=False)
