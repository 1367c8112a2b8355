"""A server of two ranks: the answers of one process, and what happens when a rank dies or stops."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from trellis.runtime import loop
from trellis.runtime.assembly import settle
from trellis.runtime.config import ServerConfig
from trellis.runtime.models import load_config, load_tokenizer
from trellis.runtime.server.supervisor import Supervisor

launching: Any = sys.modules["distributed_launching"]  # of conftest.py
ENDLESS, Server, until = launching.ENDLESS, launching.Server, launching.until

pytestmark = pytest.mark.server

GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def servers(tiny_model: Path) -> Iterator[list[Any]]:
    """On two ranks, and on one."""
    both = [Server(tiny_model, "--executor", "torch", *more) for more in (["--tp-size", "2"], [])]
    try:
        yield both
    finally:
        for server in both:
            server.process.kill()
            server.wait()


@pytest.fixture
def server(servers: list[Any]) -> Any:
    servers[0].until_healthy()
    return servers[0]


@pytest.fixture
def alone(servers: list[Any]) -> Any:
    servers[1].until_healthy()
    return servers[1]


def rank_1(server: Any) -> psutil.Process:
    return server.child("rank")


def answer(server: Any, text: str, **sampling_params: Any) -> tuple[list[int], int, Any]:
    body = {"text": text, "sampling_params": {**GREEDY, **sampling_params}}
    response = server.generate(**body)
    assert response.status_code == 200, response.text
    meta = response.json()["meta_info"]
    return response.json()["output_ids"], meta["cached_tokens"], meta["finish_reason"]


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param(
            [("one prefix, and more", {}), ("one prefix, and less", {}), ("one prefix, and more", {})],
            id="radix",
        ),
        pytest.param(
            [
                ("a date: ", {"regex": "[0-9]{4}-(01|02)-(yes|no)"}),
                ("is it? ", {"regex": "(certainly|perhaps)!"}),
            ],
            id="constraints",
        ),
        pytest.param([("x" * 1500, {}), ("x" * 1200 + "y", {})], id="chunks"),
        pytest.param([("seeded", {"temperature": 1.0, "seed": 3, "top_k": 40})], id="drawn"),
    ],
)
def test_answers_and_cache_hits_are_those_of_one_process(
    server: Any, alone: Any, requests: list[tuple[str, dict[str, Any]]]
) -> None:
    for text, params in requests:
        assert answer(server, text, **params) == answer(alone, text, **params)


def test_requests_that_arrive_together(server: Any, alone: Any) -> None:
    texts = [f"all share this, {i} not" for i in range(6)]

    def together(one: Any) -> list[str]:
        body = {"text": texts, "sampling_params": GREEDY}
        return [each["output_ids"] for each in one.generate(**body).json()]

    assert together(server) == together(alone)


def test_scores_are_those_of_one_process(server: Any, alone: Any) -> None:
    body = {"text": "abc", "options": ["one", "two", "three"]}

    def scores(one: Any) -> list[float]:
        response = httpx.post(f"{one.url}/score", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return [value for option in response.json()["options"] for value in numbers(option)]

    assert scores(server) == pytest.approx(scores(alone), abs=1e-3)


def numbers(value: Any) -> Iterator[float]:
    """Those of a JSON value, in order."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)


def test_a_client_that_leaves_frees_its_slots(server: Any) -> None:
    payload = json.dumps({"text": "abc", "sampling_params": ENDLESS}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + payload)
        until(lambda: server.running() == 1)
    until(lambda: server.running() == 0)
    info = httpx.get(f"{server.url}/server_info").json()
    assert info["free_tokens"] + info["evictable_tokens"] == info["pool_tokens"]
    assert len(answer(server, "after it")[0]) == GREEDY["max_new_tokens"]


def lose(server: Any, number: signal.Signals) -> str:
    """Signal rank 1 while it generates; the error that the client gets."""
    answers: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: answers.append(server.generate(text="abc", sampling_params=ENDLESS))
    )
    waiting.start()
    until(lambda: server.running() == 1)
    rank_1(server).send_signal(number)
    waiting.join(60)
    assert answers[0].status_code == 500
    message: str = answers[0].json()["error"]["message"]
    return message


def test_a_killed_rank_fails_what_is_in_flight_and_the_group_comes_back(server: Any, alone: Any) -> None:
    before = {child.pid for child in server.children()}
    assert "the rank-1 process died (killed by SIGKILL)" in lose(server, signal.SIGKILL)
    health = httpx.get(f"{server.url}/health")
    assert (health.status_code, health.json()["status"]) == (503, "restarting")
    assert "rank-1" in health.json()["detail"]
    assert server.generate(text="a").status_code == 503
    server.until_healthy()
    after = {child.pid for child in server.children()}
    assert len(after) == 3
    assert not before & after
    assert answer(server, "again")[0] == answer(alone, "again")[0]


@pytest.mark.slow
def test_a_stopped_rank_ends_the_group_which_comes_back(tiny_model: Path, alone: Any) -> None:
    doomed = Server(tiny_model, "--tp-size", "2", "--tp-timeout", "4")
    try:
        doomed.until_healthy()
        stopped = rank_1(doomed)
        assert "a rank is gone or stuck" in lose(doomed, signal.SIGSTOP)
        doomed.until_healthy()
        assert not stopped.is_running()
        assert answer(doomed, "and again")[0] == answer(alone, "and again")[0]
    finally:
        doomed.process.kill()
        doomed.wait()


@pytest.mark.slow
def test_a_group_whose_rank_0_is_stuck_is_started_again(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "STUCK_AFTER", 3.0)
    model = load_config(tiny_model)
    config = settle(
        ServerConfig(str(tiny_model), dtype="float32", device="cpu", num_threads=1, tp_size=2), model
    )
    ready: list[int] = []
    supervisor = Supervisor(config, lambda: load_tokenizer(tiny_model), lambda: ready.append(1), pytest.fail)
    try:
        supervisor.start()
        until(lambda: len(ready) == 1)
        before = supervisor._children["scheduler"]._process
        before.send_signal(signal.SIGSTOP)
        until(lambda: len(ready) == 2)
        assert before.returncode == -signal.SIGKILL
        assert supervisor.control("stats")["running_requests"] == 0
    finally:
        supervisor.stop()


@pytest.mark.slow
def test_all_ranks_end_when_their_parent_is_killed(tiny_model: Path) -> None:
    doomed = Server(tiny_model, "--tp-size", "2")
    try:
        doomed.until_healthy()
        children = doomed.children()
    finally:
        doomed.process.kill()
        doomed.wait()
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert (len(gone), alive) == (3, [])


def test_sigterm_leaves_no_process(server: Any) -> None:
    children = server.children()
    [sockets] = launching.socket_directories(server.child("scheduler"))
    server.process.terminate()
    assert server.wait() == 0
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert not sockets.exists()
