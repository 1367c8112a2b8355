"""The measure of how much of the kernels their tests execute (see ``conftest.py``) reaches all of them, and measures."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

import kernel_coverage
import pytest
import torch

from trellis.runtime.kernels.launch import interpreted

KERNEL = """
    import triton
    import triton.language as tl

    @triton.jit
    def half(x_ptr, n):
        at = tl.program_id(0)
        x = tl.load(x_ptr + at)
        if x < 0:
            x = -x
        if n > 2:
            x += 1.0
        tl.store(x_ptr + at, x)
"""


def test_every_kernel_is_some_tests_to_cover():
    kernels = kernel_coverage.kernel_modules()
    assert {"norms", "rotary", "activation", "masks", "limits", "race"} <= kernels
    claims = [kernel_coverage.claimed(path) for path in Path(__file__).parent.glob("test_*.py")]
    assert kernels <= set().union(*claims)


@pytest.mark.skipif(not interpreted(), reason="kernels that run on the device have no lines to follow")
def test_a_branch_that_no_kernel_takes_is_found(tmp_path):
    path = tmp_path / "half_covered.py"
    path.write_text(textwrap.dedent(KERNEL), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("half_covered", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def covered(values: list[float], n: int) -> kernel_coverage.Covered:
        measured = kernel_coverage.start([path])
        x = torch.tensor(values)
        module.half[(len(x),)](x, n)
        measured.stop()
        return kernel_coverage.read(measured, tmp_path / "report.json")["half_covered"]

    both_signs = covered([1.0, -1.0], 3)
    assert (both_signs.lines, both_signs.branches) == (100, 75)  # n is never small
    one_sign = covered([1.0], 3)
    assert (one_sign.lines, one_sign.branches) == (pytest.approx(100 * 6 / 7), 50)
    assert one_sign.missing_lines == [10]
    assert sorted(map(tuple, one_sign.missing_branches)) == [(9, 10), (11, 13)]
