"""The kernels on 64-bit ARM, in an emulator: with vectors alone, and with products of bfloat16 and of bytes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from native_tiles import BY_NAME

from trellis.runtime.native.build import SOURCES

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = (
    "-O1",
    "-static",
    "-std=gnu++17",
    "-pthread",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-Wall",
    "-Wextra",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
        reason=f"{COMPILER} and {EMULATOR} are not installed",
    ),
]


@pytest.mark.parametrize(("isa", "pair", "quad"), [("portable", 2, 2), ("neon-bf16", 1, 1)])
def test_products_and_attention(tmp_path, isa, pair, quad):
    """pair, quad: words of a panel that two and four activations take."""
    program = tmp_path / "check"
    # The check includes abi.cpp, which has what is compiled once; the formats of the pool have files of their own.
    sources = [Path(__file__).parent / "products_check.cpp", *SOURCES.glob("pool_*.cpp")]
    command = [COMPILER, *FLAGS, *BY_NAME[isa].flags, "-I", str(SOURCES), "-o", str(program)]
    subprocess.run([*command, *map(str, sources)], check=True)
    done = subprocess.run([EMULATOR, "-cpu", "max", program], capture_output=True, text=True, check=True)
    *words, worst = done.stdout.split()
    assert words == [str(pair), str(quad)]
    assert 0 < float(worst) < 1
