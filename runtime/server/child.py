"""What the processes of a server share: how a child is told what to do, and how it never outlives its parent.

The parent writes one line of JSON to the child's stdin and keeps the pipe open. The child answers with one
line of JSON on a pipe of its own, when it is ready or has failed. Either side takes the end of the other's
pipe as the end of the other: no polling, no process ids that may have been given to somebody else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from trellis.runtime.config import ServerConfig
from trellis.runtime.distributed.contract import Place

EXIT_GRACE = 5  # seconds that a child whose parent died has to end in good order
BROKEN_STATUS = 3  # exit status of a rank whose group is broken, or whose device is lost
LAST_WORDS = 0.5  # seconds between that and its end

logger = logging.getLogger(__name__)


class Settings(msgspec.Struct):
    """Down: all that a child is told. config has no automatic values left."""

    config: dict[str, Any]
    inbox: str  # address that the child listens on
    outbox: str  # address that the child sends to
    control: str = ""  # path of the control socket
    rank: int = 0
    group: str = ""  # path that the names of the group's files begin with; empty: the model is not split

    def server_config(self) -> ServerConfig:
        return ServerConfig(**self.config)

    def place(self) -> Place | None:
        """In the group of ranks that share the model."""
        if not self.group:
            return None
        return Place(self.rank, self.config["tp_size"], self.group, float(self.config["tp_timeout"]))


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

    Python runs its signal handlers between two operations of the main thread. A signal that comes just before that thread
    begins to wait in a library, or that the system gives to another thread, would wait as long: hence the pipe.
    """
    signalled, signalling = os.pipe()
    os.set_blocking(signalling, False)
    signal.set_wakeup_fd(signalling, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us in good order

    def watch() -> None:
        parent = True
        while parent:
            ready, _, _ = select.select([0, signalled], [], [])
            if signalled in ready and os.read(signalled, 4096):
                stop()
            parent = 0 not in ready or bool(os.read(0, 4096))
        # The kernel's timer, since a library that waits may hold the interpreter's lock, as a FileStore of torch does when its
        # directory is gone: for five minutes no thread of ours would run.
        signal.alarm(EXIT_GRACE)
        shutil.rmtree(Path(settings.inbox.removeprefix("ipc://")).parent, ignore_errors=True)
        stop()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def end_broken(error: BaseException) -> NoReturn:
    """End at once: what a broken group, or a lost device, has left in threads and sockets would not end by itself.

    But a moment later: of a rank that died all others notice, and the parent, which ends them, shall see that one first.
    """
    logger.error("%s: %s", type(error).__name__, error)
    time.sleep(LAST_WORDS)
    os._exit(BROKEN_STATUS)


def set_up_logging(level: str, process: str) -> None:
    """To stderr, unless the program that we are part of has its own ideas."""
    logging.basicConfig(level=level.upper(), format=f"%(asctime)s {process} %(levelname)s %(message)s")
