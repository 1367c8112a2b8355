"""Real server processes: start, clients, deaths, end. On a tiny random model, which starts in seconds."""

from __future__ import annotations

import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from trellis import cli
from trellis.launch_server import launch_server

pytestmark = pytest.mark.server

ENDLESS = {"max_new_tokens": 7000, "ignore_eos": True}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A launch_server process and what it printed."""

    def __init__(self, model: Path, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "trellis.launch_server", "--model-path", str(model)]
        command += ["--port", str(self.port), "--dtype", "float32", "--num-threads", "1", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.rstrip())

    def until_healthy(self) -> None:
        def healthy() -> bool:
            assert self.process.poll() is None, f"the server ended with status {self.process.returncode}"
            try:
                return httpx.get(f"{self.url}/health", timeout=10).status_code == 200
            except httpx.TransportError:
                return False

        until(healthy)

    def child(self, name: str) -> psutil.Process:
        [child] = [c for c in self.children() if f"trellis.runtime.server.{name}_process" in c.cmdline()]
        return child

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def generate(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/generate", json=body, timeout=60)

    def running(self) -> int:
        return int(httpx.get(f"{self.url}/server_info", timeout=30).json()["running_requests"])

    def wait(self) -> int:
        return self.process.wait(60)


def socket_directories(process: psutil.Process) -> set[Path]:
    paths = {Path(each.laddr) for each in process.net_connections("unix") if each.laddr}
    return {path.parent for path in paths if path.parent.name.startswith("trellis-")}


def until(condition: Callable[[], Any], tries: int = 1200) -> None:
    for _ in range(tries):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("the condition did not come true")


@pytest.fixture(scope="module")
def servers(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[list[Server]]:
    """One for all tests, and one for each of those that end theirs; all start at once, as most of that is waiting."""
    doomed = sum("doomed" in getattr(item, "fixturenames", ()) for item in request.session.items)
    servers = [Server(tiny_model, "--served-model-name", "tiny") for _ in range(1 + doomed)]
    try:
        yield list(servers)
    finally:
        for server in servers:
            server.process.kill()
            server.wait()


@pytest.fixture(scope="module")
def server(servers: list[Server]) -> Server:
    servers[0].until_healthy()
    return servers[0]


@pytest.fixture
def doomed(servers: list[Server]) -> Server:
    """A server of one's own, to be ended."""
    server = servers.pop()
    server.until_healthy()
    return server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_it_says_what_it_does_and_where_it_serves(server: Server) -> None:
    first, second = server.lines.get(timeout=10), server.lines.get(timeout=10)
    assert "loading" in first
    assert "float32" in first
    assert server.url in second
    assert "ready" in second


def test_openai_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_openai_completions(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "ab", "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**options)
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 6
    parts = list(client.completions.create(**options, stream=True))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert [part.choices[0].finish_reason for part in parts].count(None) == len(parts) - 1


def test_openai_chat(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**options)
    [choice] = whole.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * len(
        choice.logprobs.content
    )
    again = client.chat.completions.create(**options)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    parts = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]
    deltas = [part.choices[0].delta for part in parts[:-1]]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content


def test_openai_constraints_and_samples(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a number"}],
        n=3,
        seed=1,
        extra_body={"regex": "[0-9]{3}-(yes|no)"},
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        number, _, word = (choice.message.content or "").partition("-")
        assert number.isdigit()
        assert word in ("yes", "no")


def test_openai_errors_are_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a"}], extra_body={"regex": "("}
        )
    assert caught.value.param == "regex"
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.completions.create(model="tiny", prompt="a", top_p=7)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slots(server: Server, stream: bool) -> None:
    body = {"text": "abc", "sampling_params": ENDLESS, "stream": stream}
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        payload = json.dumps(body).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
        connection.sendall(head.encode() + b"\r\n\r\n" + payload)
        until(lambda: server.running() == 1)
    until(lambda: server.running() == 0)
    info = httpx.get(f"{server.url}/server_info").json()
    assert info["in_flight"] == 0
    assert info["free_tokens"] + info["evictable_tokens"] == info["pool_tokens"]


BAD_INPUTS: list[tuple[dict[str, Any], str]] = [
    ({"text": ""}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"text": "a" * 8192}, "text"),
    ({"text": "a" * 3_000_000}, "text"),
    ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"text": "a", "sampling_params": {"no_such": 1}}, "sampling_params.no_such"),
    ({"text": "a", "sampling_params": {"regex": "("}}, "regex"),
    ({"text": "a", "sampling_params": {"regex": "a{2,1}"}}, "regex"),
]


@pytest.mark.parametrize(("body", "field"), BAD_INPUTS)
def test_bad_input_is_400_and_the_server_goes_on(server: Server, body: dict[str, Any], field: str) -> None:
    response = server.generate(**body)
    assert response.status_code == 400
    assert response.json()["error"]["field"] == field
    assert server.generate(text="a", sampling_params={"max_new_tokens": 1}).status_code == 200


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_killed_child_fails_what_is_in_flight_and_comes_back(server: Server, victim: str) -> None:
    answers: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: answers.append(server.generate(text="abc", sampling_params=ENDLESS))
    )
    waiting.start()
    until(lambda: server.running() == 1)
    server.child(victim).kill()
    waiting.join(60)
    assert answers[0].status_code == 500
    assert f"the {victim} process died (killed by SIGKILL)" in answers[0].json()["error"]["message"]
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 503
    assert health.json()["status"] == "restarting"
    refused = server.generate(text="a")
    assert refused.status_code == 503
    assert "restarted" in refused.json()["error"]["message"]
    server.until_healthy()
    assert server.generate(text="a", sampling_params={"max_new_tokens": 2}).status_code == 200
    until(lambda: server.running() == 0)


def test_a_stream_that_loses_its_scheduler_ends_with_an_error_event(server: Server) -> None:
    events: list[str] = []
    body = {"text": "abc", "sampling_params": ENDLESS, "stream": True}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line and not events:
                server.child("scheduler").send_signal(signal.SIGKILL)
            events += [line] if line else []
    assert events[-1] == "data: [DONE]"
    assert "the scheduler process died" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
    server.until_healthy()


def test_sigterm_lets_requests_finish_and_leaves_no_process(doomed: Server) -> None:
    server = doomed
    children = server.children()
    assert len(children) == 2
    answers: list[httpx.Response] = []
    params = {"max_new_tokens": 300, "ignore_eos": True}
    waiting = threading.Thread(
        target=lambda: answers.append(server.generate(text="abc", sampling_params=params))
    )
    waiting.start()
    until(lambda: server.running() == 1)
    server.process.send_signal(signal.SIGTERM)
    waiting.join(60)
    assert answers[0].status_code == 200
    assert answers[0].json()["meta_info"]["completion_tokens"] == 300
    assert server.wait() == 0
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_children_end_when_their_parent_is_killed(doomed: Server) -> None:
    server = doomed
    [sockets] = socket_directories(server.child("scheduler"))
    children = server.children()
    server.process.kill()
    server.wait()
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert (len(gone), alive) == (2, [])
    assert not sockets.exists()


def launch(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trellis.launch_server", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_both_spellings_of_the_command_head_their_errors(capfd: pytest.CaptureFixture[str]) -> None:
    for flags in (["--model-path", "/no/such/model"], ["--no-such-flag"]):
        assert launch_server(flags, prog="trellis serve") == 2
        assert capfd.readouterr().err.startswith("trellis serve: error: ")
        assert cli.main(["serve", *flags]) == 2
        assert capfd.readouterr().err.startswith("trellis serve: error: ")
        assert launch_server(flags) == 2
        assert capfd.readouterr().err.startswith("trellis.launch_server: error: ")


def test_a_port_in_use_is_status_2(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = launch("--model-path", str(tiny_model), "--port", port)
    assert result.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_what_only_the_scheduler_process_can_find_out_is_status_2_too(tiny_model: Path) -> None:
    port = str(free_port())
    result = launch("--model-path", str(tiny_model), "--port", port, "--attention-backend", "magic")
    assert result.returncode == 2
    assert "magic" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model-path", "/no/such/model"], "/no/such/model"),
        ([], "--model-path"),
        (["--model-path", "x", "--port", "99999"], "--port"),
        (["--model-path", "x", "--port", "abc"], "--port"),
        (["--model-path", "x", "--no-such-flag"], "--no-such-flag"),
        (["--model-path", "x", "--dtype", "int3"], "--dtype"),
        (["--model-path", "x", "--eviction-policy", "magic"], "--eviction-policy"),
        (["--model-path", "x", "--max-total-tokens", "0"], "--max-total-tokens"),
        (["--model-path", "x", "--max-total-tokens", "10", "--context-length", "20"], "--context-length"),
        (["--model-path", "TINY", "--context-length", "9000"], "--context-length"),
        (["--model-path", "TINY", "--host", "no.such.host.invalid"], "--host"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_status_2(
    tiny_model: Path, capfd: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    flags = [str(tiny_model) if flag == "TINY" else flag for flag in flags]
    assert launch_server([*flags, *([] if "--port" in flags else ["--port", str(free_port())])]) == 2
    printed = capfd.readouterr()
    [line] = printed.err.splitlines()
    assert line.startswith("trellis.launch_server: error: ")
    assert message in line
    assert "ready" not in printed.out
