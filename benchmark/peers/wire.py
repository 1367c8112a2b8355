"""What the harness and an engine's process say to each other: one JSON object a line. Standard library only.

The process is started with its settings as JSON in the first argument. When it has loaded it writes
``{"ready": {"version": …}}``; then it answers each ``{"requests": […]}`` with ``{"seconds": …, "outputs": […]}``, or with
``{"error": …}`` and lives on, until its input ends. The time is taken here, alike for all engines: from the call of the
engine with token ids until every text is there.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


@dataclass(frozen=True)
class Request:
    """One sequence to generate, greedily.

    prompt: token ids. schema: a JSON schema as text; the answer ends when it is complete. Without one, exactly max_tokens
    tokens come, end-of-text or not. shared: cached prefixes may be used and left behind (False: of Trellis only).
    """

    prompt: list[int]
    max_tokens: int
    schema: str | None = None
    shared: bool = True


@dataclass(frozen=True)
class Output:
    """tokens: how many were generated, the final end-of-text not counted where the engine does not count it."""

    text: str
    tokens: int


class Runner(Protocol):
    """An engine that is loaded. version: of the package and of what matters beside it, for the table."""

    version: str

    def run(self, requests: list[Request]) -> list[Output]:
        """Generate for all of them at once; the outputs in their order. Raises what the engine raises."""
        ...

    def close(self) -> None: ...


def serve(build: Callable[[dict[str, Any]], Runner]) -> None:
    """Load the engine and answer until the input ends."""
    die_with_parent()
    answers = _private_output()
    settings = json.loads(sys.argv[1])
    pin(int(settings["threads"]))
    runner = build(settings)
    try:
        _write(answers, {"ready": {"version": runner.version}})
        for line in sys.stdin:
            _write(answers, _answer(runner, json.loads(line)))
    finally:
        runner.close()


def die_with_parent() -> None:
    """On Linux: the end of the process that started this one ends it too, also while it is stopped and reads nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def pin(threads: int) -> None:
    """Keep this process, and all threads that it starts later, on the first so many of its processors."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def _answer(runner: Runner, command: dict[str, Any]) -> dict[str, Any]:
    requests = [Request(**each) for each in command["requests"]]
    gc.collect()
    try:
        start = time.perf_counter()
        outputs = runner.run(requests)
        seconds = time.perf_counter() - start
    except Exception as error:  # the harness reports it, and the other workloads go on
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return {"seconds": seconds, "outputs": [asdict(each) for each in outputs]}


def _private_output() -> Any:
    """The standard output for answers alone: what engines print goes to the log with the errors."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _write(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
