"""The kernels beside attention compile for GPUs that are not here, and their registers suffice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compile_kernels.py")
MOST_REGISTERS = {"find_limits": 128, "race_blocks": 128}
"""Of a thread, so that its block of threads (16 and 8 warps) fits a multiprocessor of 65,536 registers."""


def compile_all(cache: Path, capability: int, *dtypes: str) -> list[dict]:
    """In a process whose kernels are not the interpreter's."""
    command = [sys.executable, str(PROGRAM), str(capability), *dtypes]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for kernel in found:
        assert (kernel["stack"], kernel["local"]) == (0, 0), f"registers do not suffice: {kernel}"
        assert kernel["registers"] <= MOST_REGISTERS.get(kernel["kernel"], 255), kernel
    return found


def test_kernels_of_a_bfloat16_model_compile_for_hopper(tmp_path):
    found = Counter(kernel["kernel"] for kernel in compile_all(tmp_path, 90, "bfloat16"))
    once = ("gate_rows", "mask_rows", "find_limits", "race_blocks", "join_blocks")
    assert found == {"norm_rows": 2, "rotate_and_store_heads": 4, **dict.fromkeys(once, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_all_kernels_compile(tmp_path, capability):
    found = compile_all(tmp_path, capability, "bfloat16", "float16", "float32")
    assert len(found) == 3 * 14 + 3 * 4
