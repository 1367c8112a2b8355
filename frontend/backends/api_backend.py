"""What the backends over official API clients share: a client for the running event loop, errors, and statistics."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

from trellis.errors import BackendError
from trellis.frontend.backends.api_errors import api_errors
from trellis.frontend.backends.base import Backend, Completion, Counts, ScoreResult, Segment


@dataclass(frozen=True)
class ApiStats:
    """calls: answers that the API gave; tokens as it counted them (and bills them).

    saved_calls, saved_prompt_tokens: gens that were answered out of text that an earlier call had written
    (``num_api_spec_tokens``), and the prompt tokens that they did not send again.
    """

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    saved_calls: int = 0
    saved_prompt_tokens: int = 0


@dataclass(frozen=True)
class _Bound:
    """A client belongs to the event loop that it was made in."""

    loop: asyncio.AbstractEventLoop
    client: Any


class APIBackend(Backend):
    """api: what messages call it. Cancelling a request closes its connection. Safe to use from several threads."""

    def __init__(self, api: str, model: str, package: str, timeout: float | None) -> None:
        self.api = api
        self.model = model
        self._timeout = timeout
        self._module = load_package(package, type(self).__name__)
        self._bound: _Bound | None = None
        self._stats = ApiStats()
        self._lock = threading.Lock()

    def stats(self) -> ApiStats:
        """What all programs on this backend have used so far."""
        return self._stats

    async def server_info(self) -> dict[str, object]:
        return {"model": self.model, **asdict(self._stats)}

    async def score(
        self,
        prompt: tuple[Segment, ...],  # noqa: ARG002
        options: Sequence[str],  # noqa: ARG002
    ) -> ScoreResult:
        raise BackendError(f"{self.api} gives no log-probabilities of its prompt")

    async def cache_prefix(self, prompt: tuple[Segment, ...]) -> None:
        """Nothing: these APIs look after their caches themselves."""

    def close(self) -> None:
        bound, self._bound = self._bound, None
        if bound is None or bound.loop.is_closed():
            return
        closing = self._close_client(bound.client)
        try:
            asyncio.run_coroutine_threadsafe(closing, bound.loop)
        except RuntimeError:  # the loop closed meanwhile, and its sockets with it
            closing.close()

    @abstractmethod
    def _make_client(self) -> Any:
        """An asynchronous client; called in the event loop that will use it."""

    async def _close_client(self, client: Any) -> None:
        with contextlib.suppress(Exception):  # nobody is left to be told
            await client.close()

    def _client(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._bound is None or self._bound.loop is not loop:
            with self._errors():
                self._bound = _Bound(loop, self._make_client())
        return self._bound.client

    def _errors(self) -> AbstractContextManager[None]:
        return api_errors(self.api, self.model, self._timeout)

    def _count(self, counts: Counts) -> Counts:
        """Enter one answer of the API."""
        with self._lock:
            now = self._stats
            self._stats = replace(
                now,
                calls=now.calls + 1,
                prompt_tokens=now.prompt_tokens + counts.prompt_tokens,
                cached_tokens=now.cached_tokens + counts.cached_tokens,
                completion_tokens=now.completion_tokens + counts.completion_tokens,
            )
        return counts

    def _count_saved(self, completion: Completion) -> Completion:
        """Enter an answer that needed no call."""
        with self._lock:
            now = self._stats
            saved = now.saved_prompt_tokens + (completion.saved_prompt_tokens or 0)
            self._stats = replace(now, saved_calls=now.saved_calls + 1, saved_prompt_tokens=saved)
        return completion


def load_package(package: str, owner: str) -> Any:
    """The official client. ImportError that says how to get it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        extra = f"pip install 'trellis-lm[{package}]'"
        raise ImportError(f"{owner} needs the package {package!r}: {extra}", name=package) from None
