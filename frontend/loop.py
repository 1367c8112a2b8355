"""The background thread whose event loop runs the operations of all program states."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

T = TypeVar("T")


class LoopThread:
    """One event loop in one daemon thread, started on first use and again after ``os.fork``.

    States post callbacks to it; none of them has a thread of its own.
    """

    def __init__(self, name: str = "trellis-loop") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop
        if loop is not None and self._pid == os.getpid():
            return loop
        return self._start()

    def _start(self) -> asyncio.AbstractEventLoop:
        import asyncio

        with self._lock:
            if self._loop is not None and self._pid == os.getpid():
                return self._loop
            loop = asyncio.new_event_loop()
            self._tasks = set()
            self._thread = threading.Thread(target=loop.run_forever, name=self._name, daemon=True)
            self._thread.start()
            self._loop, self._pid = loop, os.getpid()
            atexit.register(self.close)
            return loop

    def post(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` in the loop's thread, soon."""
        self.loop.call_soon_threadsafe(callback)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task; only from the loop's own thread. Kept alive until it is done."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop from any other thread; the future holds its result."""
        import asyncio

        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def after(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Call ``callback`` in the loop's thread after some seconds, unless the timer is cancelled."""
        return Timer(self.loop, seconds, callback)

    def forbid_blocking(self) -> None:
        """RuntimeError in the loop's own thread: it would wait for itself for ever."""
        if self._thread is not None and threading.get_ident() == self._thread.ident:
            raise RuntimeError(
                "a state was read inside a backend callback, on the thread that computes it; "
                "read states in the program's body or after run()"
            )

    @property
    def running_tasks(self) -> int:
        """Operations of states that are in progress."""
        return len(self._tasks)

    def close(self) -> None:
        """Cancel what runs and stop the thread; a later use starts a new one."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None or self._pid != os.getpid():
            return
        atexit.unregister(self.close)

        def stop() -> None:
            for task in list(self._tasks):
                task.cancel()
            loop.call_soon(loop.stop)

        loop.call_soon_threadsafe(stop)
        thread.join(timeout=5)
        if not thread.is_alive():
            loop.close()


def cancel_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task from any thread; a closed loop has nothing left to cancel."""
    with contextlib.suppress(RuntimeError):
        task.get_loop().call_soon_threadsafe(task.cancel)


class Timer:
    """A deadline that any thread may set and cancel."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], object]
    ) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None
        self._cancelled = False
        self._callback = callback
        self._post(lambda: self._arm(seconds))

    def cancel(self) -> None:
        self._cancelled = True
        self._post(self._disarm)

    def _arm(self, seconds: float) -> None:
        if not self._cancelled:
            self._handle = self._loop.call_later(seconds, self._callback)

    def _disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _post(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing will run any more
            self._loop.call_soon_threadsafe(callback)
