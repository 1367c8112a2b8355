"""What the processes of a server share: how a child is told what to do, and how it never outlives its parent.

The parent writes one line of JSON to the child's stdin and keeps the pipe open. The child answers with one
line of JSON on a pipe of its own, when it is ready or has failed. Either side takes the end of the other's
pipe as the end of the other: no polling, no process ids that may have been given to somebody else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from trellis.runtime.config import ServerConfig

EXIT_GRACE = 5.0  # seconds that a child whose parent died has to end in good order


class Settings(msgspec.Struct):
    """Down: all that a child is told. config has no automatic values left."""

    config: dict[str, Any]
    inbox: str  # address that the child listens on
    outbox: str  # address that the child sends to
    control: str = ""  # path of the control socket

    def server_config(self) -> ServerConfig:
        return ServerConfig(**self.config)


class Report(msgspec.Struct):
    """Up, once: error is empty when the child is ready. user_error: the user can mend it (a bad model path)."""

    error: str = ""
    user_error: bool = False


def read_settings() -> Settings:
    """The first thing a child does."""
    os.set_inheritable(int(sys.argv[1]), False)  # a grandchild must not keep the pipe open
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)


def report(answer: Report) -> None:
    """To the file descriptor that the parent named on the command line. It stays open: its end is our end."""
    with contextlib.suppress(BrokenPipeError):
        os.write(int(sys.argv[1]), msgspec.json.encode(answer) + b"\n")


def end_with_parent(stop: Callable[[], None], settings: Settings) -> None:
    """Call ``stop`` on SIGTERM and when the parent is gone. Main thread only.

    In the second case insist, and remove the sockets' directory, which the parent could not.
    """
    signal.signal(signal.SIGTERM, lambda *_: stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us in good order

    def watch() -> None:
        while os.read(0, 4096):
            pass
        last = threading.Timer(EXIT_GRACE, os._exit, (1,))
        last.daemon = True  # it must not itself keep the process alive
        last.start()
        shutil.rmtree(Path(settings.inbox.removeprefix("ipc://")).parent, ignore_errors=True)
        stop()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def set_up_logging(level: str, process: str) -> None:
    """To stderr, unless the program that we are part of has its own ideas."""
    logging.basicConfig(level=level.upper(), format=f"%(asctime)s {process} %(levelname)s %(message)s")
