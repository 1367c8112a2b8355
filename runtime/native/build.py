"""Compiling the kernels at first use, once for each state of sources, compiler and flags."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from trellis.runtime.native.isa import InstructionSet

SOURCES = Path(__file__).parent / "src"
FLAGS = (
    *("-O3", "-std=gnu++17", "-fPIC", "-pthread", "-fvisibility=hidden"),
    *("-fno-math-errno", "-ffp-contract=fast"),
)
COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT = 300.0  # seconds


class KernelsUnavailable(Exception):
    """The kernels cannot be compiled or loaded here; the message says why."""


def build(isa: InstructionSet) -> Path:
    """The compiled library for that instruction set, from the cache or made now.

    Safe for any number of processes at once: one compiles, the others wait for it. Raises KernelsUnavailable.
    """
    compiler = find_compiler()
    command = [*compiler, *FLAGS, *isa.flags]
    directory = cache_directory()
    target = directory / f"kernels-{isa.name}-{_digest(command)}.so"
    if target.is_file():
        return target
    with _locked(directory / f"{target.stem}.lock"):
        if not target.is_file():
            print(
                f"trellis: compiling the CPU kernels for {isa.name} with {compiler[0]} (once, some seconds)",
                file=sys.stderr,
                flush=True,
            )
            _compile(command, target)
    return target


def find_compiler() -> list[str]:
    """$CXX if it is set, else the first C++ compiler on the path. Raises KernelsUnavailable."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise KernelsUnavailable(f"the C++ compiler {chosen[0]!r} that $CXX names is not there")
        return chosen
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise KernelsUnavailable(f"no C++ compiler is installed ({', '.join(COMPILERS)}, or $CXX)")


def cache_directory() -> Path:
    """$TRELLIS_CACHE_DIR, or trellis under the user's cache directory. What lies there is loaded as code, so it must be
    the user's own and closed to others; where that cannot be had it is a fresh temporary directory."""
    named = os.environ.get("TRELLIS_CACHE_DIR")
    base = (
        Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trellis"
    )
    directory = base / "kernels"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = directory.stat()
        own = state.st_uid == os.getuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if own and os.access(directory, os.W_OK):
            return directory
    except (OSError, RuntimeError):
        pass
    return Path(tempfile.mkdtemp(prefix="trellis-kernels-"))


def _compile(command: list[str], target: Path) -> None:
    """Each source file by itself, as many at once as there are processors; then one library of them."""
    sources = sorted(SOURCES.glob("*.cpp"))
    try:
        with tempfile.TemporaryDirectory(prefix=f"{target.stem}-", dir=target.parent) as folder:
            objects = [Path(folder) / f"{source.stem}.o" for source in sources]
            commands = [
                [*command, "-c", "-o", str(made), str(source)]
                for source, made in zip(sources, objects, strict=True)
            ]
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                list(pool.map(_run, commands))
            made = Path(folder) / target.name
            _run([*command, "-shared", "-o", str(made), *map(str, objects)])
            made.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{shlex.join(command)} failed: {error}") from error


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT, check=False)
    if done.returncode != 0:
        raise KernelsUnavailable(f"{shlex.join(command)} failed: {_first_error(done.stderr)}")


def _first_error(output: str) -> str:
    lines = output.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def _digest(command: list[str]) -> str:
    """Of everything that the result depends on."""
    version = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256("\0".join(command).encode() + version)
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:24]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
