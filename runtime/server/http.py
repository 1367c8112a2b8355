"""The HTTP process: uvicorn, and signals."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

DRAIN_SECONDS = 30  # how long requests in flight may go on after SIGTERM

logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """uvicorn that ends in good order on SIGTERM and SIGINT, and then returns instead of dying of the signal.

    The first signal calls ``on_drain`` and lets requests in flight finish, a second one does not wait for them.
    on_drain may take locks: it runs on the event loop, not in the signal handler, which may interrupt this very
    thread while it holds one.
    """

    def __init__(self, app: FastAPI, log_level: str, on_drain: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning" if log_level == "info" else log_level,
                access_log=log_level == "debug",
                timeout_graceful_shutdown=DRAIN_SECONDS,
                lifespan="off",
            )
        )
        self._on_drain = on_drain
        self._signal: int | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn calls this on its event loop, soon after ``should_exit`` was set."""
        if self._signal is not None:
            name = signal.Signals(self._signal).name
            logger.info("%s: no new requests; those in flight have %d s", name, DRAIN_SECONDS)
            self._on_drain()
        await super().shutdown(sockets)

    def _end(self, number: int, _frame: object) -> None:
        """The signal handler: it only sets flags."""
        if self.should_exit:
            self.force_exit = True
            return
        self._signal = number
        self.should_exit = True
