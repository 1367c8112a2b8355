"""Text that arrives piece by piece, for any number of readers in any thread or event loop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator


class Feed:
    """An append-only list of pieces, and the one way in which anything in the language is waited for.

    A waiter names a condition; whoever changes what the condition reads calls ``wake`` afterwards. The
    condition is checked under the lock that ``wake`` takes, so no wake-up can be missed. A waiter costs
    nothing until it has to wait: thousands of feeds are cheap.
    """

    __slots__ = ("_lock", "_waiters", "pieces")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._lock = threading.Lock()
        self._waiters: list[Callable[[], None]] = []

    def append(self, text: str) -> None:
        self.pieces.append(text)
        self.wake()

    def wake(self) -> None:
        """Let every waiter look at its condition again."""
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter()

    def notify(self, ready: Callable[[], bool], waiter: Callable[[], None]) -> bool:
        """True if ``ready()`` holds now; otherwise ``waiter`` is called once, at the next ``wake``."""
        with self._lock:
            if ready():
                return True
            self._waiters.append(waiter)
            return False

    def wait(self, ready: Callable[[], bool]) -> None:
        """Block the calling thread until ``ready()``."""
        while True:
            gate = threading.Lock()
            gate.acquire()
            if self.notify(ready, gate.release):
                return
            gate.acquire()

    async def wait_async(self, ready: Callable[[], bool]) -> None:
        """Suspend the calling task until ``ready()``; works in any event loop."""
        import asyncio

        loop = asyncio.get_running_loop()
        while True:
            gate = asyncio.Event()
            if self.notify(ready, lambda gate=gate: _set_from_thread(loop, gate)):  # type: ignore[misc]
                return
            await gate.wait()

    def read(self, ended: Callable[[], bool]) -> Iterator[str]:
        """Every piece from the first one on, as they come, until ``ended()`` and all are read."""
        position = 0
        while True:
            self.wait(self._more(position, ended))
            if position == len(self.pieces):
                return
            yield self.pieces[position]
            position += 1

    async def read_async(self, ended: Callable[[], bool]) -> AsyncIterator[str]:
        """``read`` for a coroutine."""
        position = 0
        while True:
            await self.wait_async(self._more(position, ended))
            if position == len(self.pieces):
                return
            yield self.pieces[position]
            position += 1

    def _more(self, position: int, ended: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: len(self.pieces) > position or ended()

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def _set_from_thread(loop: object, gate: object) -> None:
    # The reader's loop may be closed by now (it stopped reading): then nobody waits any more.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(gate.set)  # type: ignore[attr-defined]
