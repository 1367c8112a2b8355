"""The background thread whose event loop runs the operations of all program states."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

T = TypeVar("T")
_CLOSING = 2.0  # seconds that cancelled tasks have to end


class NeverBlocks(threading.Thread):
    """A thread that runs an event loop of the language: nothing may wait in it."""


def forbid_blocking() -> None:
    """RuntimeError in the loop's own thread: it would wait for itself for ever."""
    if isinstance(threading.current_thread(), NeverBlocks):
        raise RuntimeError(
            "a state was read inside a backend callback or the body of an async program, on the thread that "
            "computes it; read states after run(), and in async programs use await (await s['x'], "
            "await program.run_async(...))"
        )


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
        self._posted: deque[tuple[contextvars.Context, Callable[[], object]]] = deque()
        self._woken = False

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
            self._tasks, self._posted, self._woken = set(), deque(), False
            self._thread = NeverBlocks(target=loop.run_forever, name=self._name, daemon=True)
            self._thread.start()
            self._loop, self._pid = loop, os.getpid()
            atexit.register(self.close)
            return loop

    def post(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` in the loop's thread, soon, in the caller's context.

        Waking the loop costs a system call, in which the interpreter changes threads. So what is posted before the
        loop has got to it is called all at once.
        """
        loop = self.loop
        self._posted.append((contextvars.copy_context(), callback))
        if not self._woken:
            self._woken = True
            try:
                loop.call_soon_threadsafe(self._call_posted)
            except BaseException:  # Ctrl-C in the midst of it: the next one wakes the loop
                self._woken = False
                raise

    def _call_posted(self) -> None:
        self._woken = False  # before the first is taken: what is posted from here on wakes the loop again
        posted = self._posted
        while posted:
            context, callback = posted.popleft()
            try:
                context.run(callback)
            except Exception as error:
                self.loop.call_exception_handler({"message": f"in {callback!r}", "exception": error})

    def is_here(self) -> bool:
        """Whether this is the loop's own thread."""
        return self._thread is threading.current_thread()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task; only from the loop's own thread. Kept alive until it is done."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop from any other thread; the future holds its result."""
        import asyncio

        return asyncio.run_coroutine_threadsafe(self._counted(coroutine), self.loop)

    def result(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run what ``work`` makes in the loop and wait for what it gives; an interruption (Ctrl-C) cancels it.
        RuntimeError on the loop's own thread."""
        forbid_blocking()
        future = self.call(work())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _counted(self, coroutine: Coroutine[Any, Any, T]) -> T:
        import asyncio

        task: asyncio.Task[Any] | None = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await coroutine
        finally:
            self._tasks.discard(task)

    def after(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Call ``callback`` in the loop's thread after some seconds, unless the timer is cancelled."""
        return Timer(self.loop, seconds, callback)

    @property
    def running_tasks(self) -> int:
        """Operations of states and bodies of async programs that are in progress."""
        return len(self._tasks)

    def close(self) -> None:
        """Cancel what runs and stop the thread; a later use starts a new one."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None or self._pid != os.getpid():
            return
        atexit.unregister(self.close)

        async def stop() -> None:
            import asyncio

            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_CLOSING)
            loop.stop()

        loop.call_soon_threadsafe(lambda: loop.create_task(stop()))
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
