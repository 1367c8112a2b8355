"""The project's own tests that need a GPU (marker ``gpu``), run in this process."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from benchmark.gpu.report import Report

SECTION = "tests"
MARK = "pytest.mark.gpu"
NEEDED = ("pytest", "hypothesis", "httpx", "coverage")


class Outcomes:
    """A plugin of pytest that keeps what came of each test."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.skipped:
            self.skipped.append(f"{report.nodeid}: {report.longrepr[-1]}")
        elif report.when == "call":
            self.passed += 1

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def run_device_tests(report: Report, root: Path) -> None:
    """Those of the files under ``root``/test in which the marker stands. A failure is named, and shown in full by pytest."""
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            report.skip(SECTION, "tests that need a GPU", f"{name} is not installed")
            return
    import pytest

    # Where they think that there is no GPU they would have kernels run in Triton's interpreter.
    os.environ["TRITON_INTERPRET"] = "0"
    files = sorted(path for path in (root / "test").rglob("test_*.py") if _needs_gpu(path))
    outcomes = Outcomes()
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist", "--import-mode=importlib"]
    status = pytest.main(["-c", os.devnull, "--rootdir", str(root), *options, *map(str, files)], [outcomes])
    # pytest leaves these, and with them all that a failed test had on the device.
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    for name in outcomes.failed:
        report.right(SECTION, name, False)
    for name in outcomes.skipped:
        report.skip(SECTION, *name.split(": ", 1))
    ended = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and outcomes.passed > 0
    report.right(
        SECTION, "tests that need a GPU", ended, f"{outcomes.passed} passed, {len(outcomes.failed)} failed"
    )


def _needs_gpu(path: Path) -> bool:
    lines = path.read_text(encoding="utf-8").splitlines()
    return any(line.strip().startswith((MARK, f"@{MARK}", f"pytestmark = {MARK}")) for line in lines)
