"""The control plane goes on where the system cannot give it a thread."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rpyc.utils import server as rpyc_server

from trellis.errors import BackendError
from trellis.runtime.server.control import ControlServer, call_control


class Loop:
    """Answers every command with its name."""

    def control(self, command: str, *_: Any, **__: Any) -> str:
        return command


def answered(path: str) -> bool:
    """Whether a call is, within some seconds: the server listens a moment after its start."""
    for _ in range(100):
        try:
            return bool(call_control(path, "stats", 5.0, {}) == "stats")
        except BackendError:
            time.sleep(0.05)
    return False


def test_a_connection_without_a_thread_is_closed_and_the_next_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "control")
    loop: Any = Loop()
    server = ControlServer(path, loop)
    server.start()
    try:
        assert answered(path)

        def no_thread(*_: Any, **__: Any) -> threading.Thread:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(rpyc_server, "spawn", no_thread)
            with pytest.raises(BackendError, match="does not answer 'stats'"):
                call_control(path, "stats", 5.0, {})
        assert answered(path)
    finally:
        server.close()
