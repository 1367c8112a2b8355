"""Fixtures that more than one room needs: the default model, an engine on it, a server on it.

Loading the model takes seconds, so each is made once a run.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import settings

# Some tests load torch before the runtime does; see runtime/assembly.py.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Without a GPU, Triton's kernels run in its interpreter. What decides is set when triton is first imported, whoever does.
if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Machines are noisy: what a test asserts is counted, never timed.
settings.register_profile("trellis", deadline=None)
settings.load_profile("trellis")

MODEL = "smollm2-135m"
# Enough for every test, small enough that a leak shows as a full pool.
POOL_TOKENS = 24_576


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def model_path() -> Path:
    from trellis.runtime.models import resolve_model_path

    return resolve_model_path(MODEL)


@pytest.fixture(scope="session")
def engine() -> Iterator[object]:
    """The in-process backend on the default model, in float32 so that greedy text is comparable."""
    from trellis import Engine

    backend = Engine(MODEL, dtype="float32", max_total_tokens=POOL_TOKENS)
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """Base URL of a real server process on the default model, float32."""
    port = free_port()
    command = [sys.executable, "-m", "trellis.launch_server", "--model-path", MODEL, "--port", str(port)]
    command += ["--dtype", "float32", "--max-total-tokens", str(POOL_TOKENS)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, process)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], tries: int = 240) -> None:
    for _ in range(tries):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode} before it was ready")
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"no healthy server at {url} after {tries} tries")
