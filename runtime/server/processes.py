"""One child process, as its parent sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import IO

import msgspec

from trellis.runtime.server.child import BROKEN_STATUS, Report, Settings


class Child:
    """A started child. ``fd`` becomes readable when there is a report, or when the child has ended.

    It runs in a session of its own, so that Ctrl-C in the terminal reaches the parent alone. name: the module that it runs,
    ``scheduler`` for ``scheduler_process``; with a number, as in ``rank-1``, where there are several.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.ready = False
        self.report: Report | None = None
        module = f"trellis.runtime.server.{name.partition('-')[0]}_process"
        self.fd, write_end = os.pipe()
        os.set_blocking(self.fd, False)
        self._buffer = b""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(write_end)],
                stdin=subprocess.PIPE,
                pass_fds=[write_end],
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        with contextlib.suppress(BrokenPipeError):  # it died at once; the end of its pipe will say so
            self._stdin.write(msgspec.json.encode(settings) + b"\n")
            self._stdin.flush()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None  # opened as a pipe
        return self._process.stdin

    def read(self) -> bool:
        """Take what the child said. False: it has ended."""
        try:
            data = os.read(self.fd, 65536)
        except BlockingIOError:
            return True
        self._buffer += data
        if b"\n" in self._buffer and self.report is None:
            self.report = msgspec.json.decode(self._buffer.partition(b"\n")[0], type=Report)
            self.ready = not self.report.error
        return bool(data)

    def end(self, force: bool = False) -> None:
        """Ask it to end, or kill it; ``reap`` waits for that."""
        self._process.send_signal(signal.SIGKILL if force else signal.SIGTERM)

    def reap(self, grace: float) -> str:
        """Wait for its end, kill it after ``grace`` seconds, close the pipes. Returns how it ended."""
        try:
            code = self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        os.close(self.fd)
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        if code == BROKEN_STATUS:
            return f"exit code {code}: a rank is gone or stuck, or its device is lost"
        return f"exit code {code}"
