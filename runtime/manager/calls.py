"""Waiting for the outputs of requests, on whatever event loop the caller has."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import dataclass, field

from trellis.errors import TrellisError
from trellis.runtime.manager.types import GenerateResult
from trellis.runtime.messages import Counts, FinishReason, GenerateCommand, TextOutput


@dataclass(eq=False)
class Call:
    """One or more requests that were sent together and are awaited together on one event loop.

    Everything but the constructor runs on that loop. Deltas that nobody has taken yet are merged, so a slow
    reader costs no more memory than the result itself.

    commands: the requests. names: their public ids. truncated: how many tokens each one's prompt has lost. index: place of each wire id in both. open: wire ids that
    are not finished.
    """

    commands: list[GenerateCommand]
    names: list[str]
    loop: asyncio.AbstractEventLoop
    truncated: list[int]
    started: float = field(default_factory=time.monotonic)
    index: dict[str, int] = field(init=False)
    open: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.index = {command.rid: i for i, command in enumerate(self.commands)}
        self.open = set(self.index)
        self._ready: dict[int, GenerateResult] = {}
        self._counts: dict[int, Counts] = {}
        self._error: TrellisError | None = None
        self._changed = asyncio.Event()

    def push(self, outputs: list[TextOutput]) -> None:
        """Take outputs of this call's requests."""
        latency = time.monotonic() - self.started
        for output in outputs:
            if output.rid not in self.open:
                continue
            index = self.index[output.rid]
            delta = GenerateResult.from_output(self.names[index], output, latency)
            delta.truncated_tokens = self.truncated[index]
            if output.input_logprobs is not None:
                command = self.commands[index]
                delta.input_token_ids = command.token_ids[max(command.logprob_start, 0) :]
            self._counts[index] = output.counts
            if index in self._ready:
                self._ready[index].add(delta)
            else:
                self._ready[index] = delta
            if output.finish is not None:
                self.open.remove(output.rid)
        self._changed.set()

    def abort(self, wires: list[str]) -> None:
        """End these requests with what they have so far."""
        aborted = FinishReason("abort", message="aborted on request")
        here = [(wire, self._counts.get(self.index[wire], Counts())) for wire in wires if wire in self.open]
        self.push([TextOutput(rid=w, text="", token_ids=[], counts=c, finish=aborted) for w, c in here])

    def fail(self, error: TrellisError) -> None:
        """End the whole call with an error."""
        if self._error is None and self.open:
            self._error = error
            self.open.clear()
            self._changed.set()

    async def take(self) -> dict[int, GenerateResult]:
        """Wait for deltas, by index. Raises the error of a failed call once all deltas are taken."""
        await self._changed.wait()
        if not self._ready and self._error is not None:
            raise copy.copy(
                self._error
            )  # an exception that several tasks raise collects all their tracebacks
        ready, self._ready = self._ready, {}
        if self._error is None:
            self._changed.clear()
        return ready
