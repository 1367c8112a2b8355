"""The kernels of the Triton attention compile for GPUs that are not here, and fit in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compile_attention.py")
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}
"""Bytes that a program may have, by compute capability. Source: CUDA C++ programming guide, technical specifications."""


def compile_all(cache: Path, capability: int, types: str, variants: str, *head_dims: int) -> list[dict]:
    """In a process whose kernels are not the interpreter's."""
    command = [sys.executable, str(PROGRAM), str(capability), types, variants, *map(str, head_dims)]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found: list[dict], capability: int) -> None:
    may_spill = (
        ("fp32", "fp8") if capability == 120 else ("fp32",)
    )  # 16 bytes of a tile of 128 rows for heads of 80
    for kernel in found:
        assert kernel["shared"] <= SHARED_MEMORY[capability], kernel
        if kernel.get("type") not in may_spill:
            assert (kernel["stack"], kernel["local"]) == (0, 0), f"registers do not suffice: {kernel}"
        if kernel.get("type") in ("bf16", "fp16"):
            assert kernel["async_copies"] > 0, f"keys are not copied 16 bytes at a time: {kernel}"
            assert kernel["wgmma"] == (capability == 90 and kernel["height"] >= 64), kernel


def test_kernels_for_heads_of_128_compile_for_hopper(tmp_path):
    found = compile_all(tmp_path, 90, "bf16", "plain", 128)
    assert [kernel["kernel"] for kernel in found] == ["merge", *["attend"] * 3]
    check(found, 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_all_kernels_compile(tmp_path, capability, head_dim):
    types = "bf16,fp16,fp32" if capability == 80 else "bf16,fp16,fp8,fp32"
    check(compile_all(tmp_path, capability, types, "all", head_dim), capability)
