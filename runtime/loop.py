"""The loop that drives a scheduler: in a thread of its own, or as the life of the scheduler process."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from trellis.errors import BackendError, InvalidRequestError
from trellis.runtime.manager.transport import Receiver
from trellis.runtime.messages import AbortCommand, GenerateCommand, TokenOutput

IDLE_BEAT = 1.0  # seconds between heartbeats of a loop that has nothing to do
STUCK_AFTER = 120.0  # seconds
CONTROL_TIMEOUT = 60.0  # seconds; a control command waits for the step that is running

Command = GenerateCommand | AbortCommand


@dataclass(frozen=True)
class Health:
    """status: ``ok``, or why not: ``starting``, ``restarting``, ``stuck``, ``draining``, ``ended``."""

    status: str
    detail: str = ""
    heartbeat_age_s: float | None = None

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @staticmethod
    def of_heartbeat(age_s: float) -> Health:
        """ok, unless the loop did not come round for so long that no step can explain it."""
        if age_s <= STUCK_AFTER:
            return Health("ok", heartbeat_age_s=age_s)
        return Health("stuck", f"the scheduler has been in one step for {age_s:.0f} s", age_s)


class SteppedScheduler(Protocol):
    """What the loop needs of a scheduler."""

    def add(self, commands: list[GenerateCommand]) -> None: ...
    def abort(self, rid: str) -> None: ...
    def step(self) -> list[TokenOutput]: ...
    def has_work(self) -> bool: ...
    def flush_cache(self) -> dict[str, Any]: ...
    def stats(self) -> dict[str, Any]: ...
    def set_policy(self, name: str) -> None: ...
    def cache_snapshot(self, limit: int, edge_tokens: int, namespace: str | None) -> Any: ...


class SchedulerLoop:
    """Requests from ``inbox``, a step, outputs to ``outbox``; control commands between two steps.

    When there is nothing to do it sleeps in ``inbox.receive``. outbox runs on the loop's thread. stopping: set
    it and wake the inbox to end the loop, which is what ``stop`` does. when_idle: called on the loop's thread
    about every ``IDLE_BEAT`` seconds while there is nothing to do.
    """

    def __init__(
        self,
        scheduler: SteppedScheduler,
        inbox: Receiver[Command],
        outbox: Callable[[list[TokenOutput]], None],
        stopping: threading.Event | None = None,
        when_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._scheduler = scheduler
        self._inbox = inbox
        self._outbox = outbox
        self._stopping = stopping or threading.Event()
        self._when_idle = when_idle
        self._lock = threading.Lock()
        self._closed = False
        self._controls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._beat = time.monotonic()

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the loop last came round; grows while a step runs, at most ``IDLE_BEAT`` when idle."""
        return time.monotonic() - self._beat

    @property
    def ended(self) -> bool:
        """No step will be made any more."""
        return self._closed

    def run(self) -> None:
        """Until ``stop``. An exception of the scheduler ends it and is raised."""
        try:
            while not self._stopping.is_set():
                self._beat = time.monotonic()
                self._turn()
        finally:
            self._close()

    def stop(self) -> None:
        """End after the step that is running. Any thread, any number of times."""
        self._stopping.set()
        self._inbox.wake()

    def control(self, command: str, timeout: float = CONTROL_TIMEOUT, **arguments: Any) -> Any:
        """Run a command between two steps and return its result. Not from the loop's own thread.

        Commands: ``flush_cache``, ``stats``, ``set_policy(name)``, ``cache_snapshot(limit, edge_tokens,
        namespace)``, and ``health``, which does not wait for a step. Raises InvalidRequestError for an unknown
        one, BackendError when the loop has ended or does not come round in ``timeout`` seconds, and what the
        command raises.
        """
        if command == "health":
            return {"heartbeat_age_s": self.heartbeat_age}
        action = self._action(command, arguments)
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise BackendError("the scheduler has ended")
            self._controls.append((action, future))
        self._inbox.wake()
        try:
            return future.result(timeout)
        except FutureTimeout:
            future.cancel()
            raise BackendError(f"the scheduler did not get to {command!r} within {timeout:g} s") from None

    def _action(self, command: str, arguments: dict[str, Any]) -> Callable[[], Any]:
        scheduler = self._scheduler
        known: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
            "flush_cache": (scheduler.flush_cache, ()),
            "stats": (scheduler.stats, ()),
            "set_policy": (scheduler.set_policy, ("name",)),
            "cache_snapshot": (scheduler.cache_snapshot, ("limit", "edge_tokens", "namespace")),
        }
        if command not in known:
            raise InvalidRequestError(
                "command", f"unknown {command!r}; known: health, {', '.join(sorted(known))}"
            )
        method, names = known[command]
        if set(arguments) != set(names):
            raise InvalidRequestError(command, f"takes the arguments ({', '.join(names)})")
        return lambda: method(*(arguments[name] for name in names))

    def _turn(self) -> None:
        commands = self._inbox.receive(0.0 if self._scheduler.has_work() else IDLE_BEAT)
        self._take(commands)
        while self._controls:
            action, future = self._controls.popleft()
            if future.set_running_or_notify_cancel():
                _settle(action, future)
        if commands or self._scheduler.has_work():
            outputs = self._scheduler.step()
            if outputs:
                self._outbox(outputs)
        elif time.monotonic() - self._beat > IDLE_BEAT / 2:
            self._when_idle()

    def _take(self, commands: Sequence[Command]) -> None:
        for is_abort, group in groupby(commands, key=lambda command: isinstance(command, AbortCommand)):
            if is_abort:
                for command in group:
                    self._scheduler.abort(command.rid)
            else:
                self._scheduler.add([command for command in group if isinstance(command, GenerateCommand)])

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            left, self._controls = self._controls, deque()
        for _, future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(BackendError("the scheduler has ended"))


def _settle(action: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(action())
    except Exception as error:
        future.set_exception(error)
