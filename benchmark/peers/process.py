"""An engine in a process group of its own, which stands still while another one is measured.

Engines keep threads that spin for a while after each call, and some for ever. So the whole group is stopped (SIGSTOP)
between its turns and goes on (SIGCONT) for the next one: two engines never run at the same time, and both stay loaded.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark.peers.wire import Output, Request

LOAD_TIMEOUT = 900.0  # seconds; a peer may compile its kernels
STOP_TIMEOUT = 20.0
ROOT = Path(__file__).parents[2]


class EngineFailed(Exception):
    """An engine that cannot be had, ended, did not answer, or answered wrongly; the message says which and why."""


class EngineProcess:
    """A driver that is loaded. Raises EngineFailed when it does not load; its log then says more.

    command: interpreter, arguments of the interpreter, and the settings as the last one.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        timeout: float,
    ) -> None:
        self.name, self._log, self._timeout = name, log, timeout
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.version = str(self._answer(LOAD_TIMEOUT)["ready"]["version"])
        except EngineFailed:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Only inside may it be asked for anything."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def run(self, requests: Sequence[Request]) -> tuple[float, list[Output]]:
        """Seconds and outputs. EngineFailed: it raised, ended, or took longer than the time-out (and was ended)."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"requests": [asdict(each) for each in requests]}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EngineFailed(f"{self.name} has ended: {self._last_words()}") from error
        answer = self._answer(self._timeout)
        if "error" in answer:
            raise EngineFailed(f"{self.name}: {answer['error']}")
        return float(answer["seconds"]), [Output(**each) for each in answer["outputs"]]

    def close(self, patience: float = STOP_TIMEOUT) -> None:
        """End the whole group, by force after so many seconds. Idempotent."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # also what the driver had started
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, timeout: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            self.close(patience=0)
            raise EngineFailed(f"{self.name} did not answer within {timeout:.0f} s and was ended") from None
        if not line:
            raise EngineFailed(f"{self.name} has ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        lines = [
            line
            for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            if line.strip()
        ]
        return f"{lines[-1].strip() if lines else 'it said nothing'} (all of it: {self._log})"

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
