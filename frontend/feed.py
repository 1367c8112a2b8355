"""Text that arrives piece by piece, for any number of readers in any thread or event loop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from trellis.frontend.loop import forbid_blocking

if TYPE_CHECKING:
    import asyncio


class Feed:
    """An append-only list of pieces, and the one way in which anything in the language is waited for.

    A waiter names a condition; whoever changes what the condition reads calls ``wake`` afterwards. No wake-up can be
    missed: a waiter stands in the list before its condition is checked, so either the check sees the change, or the
    wake that follows the change sees the waiter. There is no lock (operations on lists are atomic), and a waiter costs
    nothing until it has to wait: thousands of feeds are cheap.
    """

    __slots__ = ("_waiters", "pieces")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._waiters: list[Callable[[], None]] = []

    def append(self, text: str) -> None:
        self.pieces.append(text)
        self.wake()

    def wake(self) -> None:
        """Let every waiter look at its condition again."""
        waiters = self._waiters
        for _ in range(len(waiters)):  # not those that come back while this goes on
            try:
                waiter = waiters.pop(0)
            except IndexError:  # another thread wakes them, too
                return
            waiter()

    def notify(self, ready: Callable[[], bool], waiter: Callable[[], None]) -> bool:
        """True if ``ready()`` holds now; otherwise ``waiter`` is called once, at the next ``wake``."""
        if ready():
            return True
        self._waiters.append(waiter)
        return ready() and self._forget(waiter)

    def _forget(self, waiter: Callable[[], None]) -> bool:
        """Whether it was waiting, and so will not be called."""
        try:
            self._waiters.remove(waiter)
        except ValueError:
            return False
        return True

    def wait(self, ready: Callable[[], bool]) -> None:
        """Block the calling thread until ``ready()``. RuntimeError where it would block the loop thread."""
        while not ready():
            gate = threading.Lock()
            gate.acquire()
            if self.notify(ready, gate.release):
                return
            forbid_blocking()
            gate.acquire()

    async def wait_async(self, ready: Callable[[], bool]) -> None:
        """Suspend the calling task until ``ready()``; works in any event loop."""
        if ready():
            return
        import asyncio

        loop = asyncio.get_running_loop()
        while True:
            gate: asyncio.Future[None] = loop.create_future()
            waiter = Release(loop, gate)
            if self.notify(ready, waiter):
                return
            try:
                await gate
            except asyncio.CancelledError:
                self._forget(waiter)
                raise

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


class Release:
    """Opens the gate of one waiting task, from any thread."""

    __slots__ = ("_gate", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, gate: asyncio.Future[None]) -> None:
        self._loop = loop
        self._gate = gate

    def __call__(self) -> None:
        import asyncio

        if asyncio._get_running_loop() is self._loop:
            self._open()
            return
        # The reader's loop may be closed by now (it stopped reading): then nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._open)

    def _open(self) -> None:
        if not self._gate.done():
            self._gate.set_result(None)
