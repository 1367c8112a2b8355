"""A child ends when it is told to, and never outlives its parent, whatever it is doing."""

from __future__ import annotations

import signal
import subprocess
import sys

BUSY = """
import ctypes, threading
from trellis.runtime.server import child
child.EXIT_GRACE = 1
stopped = threading.Event()
child.end_with_parent(stopped.set, child.Settings({}, "ipc:///nowhere/at/all/inbox", ""))
print("ready", flush=True)
stopped.wait()
ctypes.PyDLL(None).sleep(600)  # keeps the interpreter's lock
"""

WAITING = """
import signal, threading
from trellis.runtime.server import child
stopped = threading.Event()
child.end_with_parent(stopped.set, child.Settings({}, "ipc:///nowhere/at/all/inbox", ""))
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # another thread gets it
print("ready", flush=True)
stopped.wait()
"""


def test_a_child_ends_though_another_thread_gets_the_signal() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_child_ends_though_a_library_holds_the_interpreters_lock() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            process.stdin.close()
            assert process.wait(60) == -signal.SIGALRM
        finally:
            process.kill()
