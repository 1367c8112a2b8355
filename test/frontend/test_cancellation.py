"""However a program is ended, its requests are aborted where they run, and what comes next is served."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from trellis import ProgramError, RequestAborted, function, gen, select, server_info


@function
def endless(s: Any) -> None:
    s += "Count: "
    branches = s.fork(2)
    branches += lambda i: f"{i}" + gen("x", n=2, max_tokens=4000, ignore_eos=True)
    branches.join()


@function
def short(s: Any) -> None:
    s += "Say" + select("x", [" a", " b"]) + gen("y", max_tokens=2)


def running(language: Any) -> int:
    if language.name == "mock":
        return int(language.backend.active)
    return int(server_info(language.backend)["running_requests"])


def until_busy(language: Any) -> None:
    """Some requests run; others may wait for room."""
    _until(lambda: running(language) >= 2)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


@pytest.fixture
def steady(language: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend that tells how many requests run, and on which ``endless`` does not end."""
    if language.name == "mock":
        monkeypatch.setattr(language.backend, "_latency", float("inf"))
    elif not language.tells_stats:
        pytest.skip("it does not tell what runs")
    return language


def assert_free(language: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _until(lambda: running(language) == 0)
    if language.name == "mock":
        monkeypatch.setattr(language.backend, "_latency", 0.0)
    assert short.run(backend=language.backend)["x"] in (" a", " b")


def test_leaving_the_block_of_a_running_program(steady: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with endless.run(backend=steady.backend, stream=True) as state:
        until_busy(steady)
    assert isinstance(state.error().__cause__, RequestAborted)
    assert_free(steady, monkeypatch)


def test_cancelling_a_state_that_somebody_waits_for(steady: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    state = endless.run(backend=steady.backend, stream=True)
    reader = threading.Thread(target=lambda: found.append(state.error()))
    reader.start()
    until_busy(steady)
    state.cancel("enough")
    reader.join(60)
    assert "enough" in str(found[0])
    assert_free(steady, monkeypatch)


def test_the_timeout_of_a_program(steady: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProgramError) as caught:
        endless.run(backend=steady.backend, timeout=1.0)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert_free(steady, monkeypatch)


def test_an_interruption_by_the_keyboard(steady: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        until_busy(steady)
        # To the thread that waits, as the terminal does.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            endless.run(backend=steady.backend)
    finally:
        signal.signal(signal.SIGINT, before)
    assert_free(steady, monkeypatch)


def test_leaving_the_block_of_a_fork_by_an_error(steady: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @function
    def program(s: Any) -> None:
        s += "Count: "
        with s.fork(4) as branches:
            branches += lambda i: f"{i}" + gen("x", max_tokens=4000, ignore_eos=True)
            until_busy(steady)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        program.run(backend=steady.backend)
    assert_free(steady, monkeypatch)
