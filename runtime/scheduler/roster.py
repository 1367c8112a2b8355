"""Which requests there are, and at which stage of their life each is."""

from __future__ import annotations

from bisect import bisect_left, insort
from concurrent.futures import Future
from typing import Any, Protocol

from trellis.fsm.contract import ConstraintSpec, Grammar
from trellis.runtime.scheduler.request import Request


class Compiler(Protocol):
    """What the scheduler asks of ``trellis.fsm.GrammarCompiler``."""

    def submit(self, spec: ConstraintSpec) -> Future[Grammar]:
        """Compile in another thread; the future raises ConstraintError for what is refused."""

    def stats(self) -> dict[str, Any]:
        """Numbers for people."""


class Roster:
    """All live requests. by_id: exactly the requests of the three stages.

    compiling: the grammar is not ready; not in the queue yet. waiting: the highest priority first, of equals the
    oldest. running: in the order of admission; these, and only these, may hold slots. prefilling, decoding: the
    running ones, with a part of their prompt to compute, and without; each in the order of admission to it.
    changes: grows whenever a request begins or ends to wait or to run.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, Request] = {}
        self.compiling: dict[Request, Future[Grammar]] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.changes = 0

    @property
    def queued(self) -> int:
        return len(self.waiting) + len(self.compiling)

    def compile(self, request: Request, grammar: Future[Grammar]) -> None:
        """A new request whose grammar is being compiled."""
        request.stage = "compiling"
        self.by_id[request.rid] = request
        self.compiling[request] = grammar

    def compiled(self) -> list[tuple[Request, Future[Grammar]]]:
        """Requests whose grammar is there (or failed); they stay where they are until moved."""
        return [entry for entry in self.compiling.items() if entry[1].done()]

    def wait(self, request: Request) -> None:
        """Into the queue, at the place that its arrival gives: new, compiled, or retracted."""
        self._leave(request)
        self.changes += 1
        request.stage = "waiting"
        self.by_id[request.rid] = request
        insort(self.waiting, request, key=_place)

    def run(self, request: Request) -> None:
        """From the queue to the running requests."""
        self._leave(request)
        request.stage = "running"
        request.admitted_len = len(request.tokens)
        self.running.append(request)
        self.prefilling.append(request)

    def settle(self) -> None:
        """Move those whose prompt is computed from ``prefilling`` to ``decoding``. O(prefilling)."""
        if self.prefilling:
            self.decoding += [request for request in self.prefilling if not request.prefilling]
            self.prefilling = [request for request in self.prefilling if request.prefilling]

    def end(self, request: Request) -> None:
        """It needs nothing any more; a grammar that nobody else waits for is not compiled."""
        grammar = self.compiling.get(request)
        self._leave(request)
        if grammar is not None:
            grammar.cancel()
        request.stage = "finished"
        self.by_id.pop(request.rid, None)

    def _leave(self, request: Request) -> None:
        if self.by_id.get(request.rid) is not request:
            return
        self.changes += 1
        if request.stage == "compiling":
            self.compiling.pop(request, None)
        elif request.stage == "waiting":
            del self.waiting[bisect_left(self.waiting, _place(request), key=_place)]
        elif request.stage == "running":
            self.running.remove(request)
            (self.decoding if request in self.decoding else self.prefilling).remove(request)


def _place(request: Request) -> tuple[int, int]:
    return (-request.priority, request.order)
