"""Kernels run in Triton's interpreter where there is no CUDA device (``test/conftest.py`` sees to that), and on the device
where there is one. In the interpreter their coverage is held.

A process that has interpreted a kernel cannot compile any more, as the interpreter leaves parts of the language replaced;
tests that compile start a process of their own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trellis.runtime.kernels.launch import interpreted, why_not

sys.path.insert(0, str(Path(__file__).parent))  # for kernel_coverage

import kernel_coverage

collect_ignore_glob = (
    [] if importlib.util.find_spec("triton") else ["test_*.py"]
)  # there is none but for Linux


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels of this process can run."""
    where = torch.device("cpu" if interpreted() else "cuda")
    assert why_not(where) is None
    return where


@pytest.fixture(scope="module", autouse=True)
def hold_coverage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails if the tests of a module leave too much of what it ``COVERS`` unexecuted. Nothing is held where only some of
    them run, one has failed, the device runs the kernels, or something else (a debugger) follows the lines."""
    covers = getattr(request.module, "COVERS", ())
    if not covers or not interpreted() or sys.gettrace() is not None or _are_some_left_out(request.config):
        yield
        return
    failed = request.session.testsfailed
    measured = kernel_coverage.start(kernel_coverage.KERNELS / f"{name}.py" for name in covers)
    yield
    measured.stop()
    if request.session.testsfailed > failed:
        return
    found = kernel_coverage.read(measured, tmp_path_factory.mktemp("coverage") / "kernels.json")
    for name in covers:
        least = min(found[name].lines, found[name].branches)
        assert least >= kernel_coverage.LEAST_PERCENT, f"runtime/kernels/{name}.py: {found[name]}"


def _are_some_left_out(config: pytest.Config) -> bool:
    chosen = config.option.keyword or any("::" in str(arg) for arg in config.args)
    return bool(chosen or config.getoption("lf", False) or config.option.markexpr not in ("", "not slow"))
