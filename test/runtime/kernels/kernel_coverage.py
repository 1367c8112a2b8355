"""Which lines and branches of a kernel module its tests execute.

Triton's interpreter runs a kernel's own lines, so they can be measured like any others. A test module names the kernel
modules it answers for in ``COVERS``; they are measured while its tests run (see ``conftest.py``).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import coverage

KERNELS = Path(__file__).parents[3] / "runtime" / "kernels"
LEAST_PERCENT = 95.0


@dataclass(frozen=True)
class Covered:
    """Of the bodies of all functions of a module; what runs on import is not counted. lines, branches: percent."""

    lines: float
    branches: float
    missing_lines: list[int]
    missing_branches: list[list[int]]


def start(paths: Iterable[Path]) -> coverage.Coverage:
    """Measure these modules from now on, in memory."""
    measured = coverage.Coverage(
        branch=True, include=[str(path) for path in paths], data_file=None, config_file=False
    )
    measured.start()
    return measured


def read(measured: coverage.Coverage, scratch: Path) -> dict[str, Covered]:
    """By the name of the module. scratch: a file to write a report to."""
    measured.json_report(outfile=str(scratch))
    files = json.loads(scratch.read_text(encoding="utf-8"))["files"]
    return {Path(name).stem: _of_functions(report["functions"]) for name, report in files.items()}


def _of_functions(functions: dict) -> Covered:
    bodies = [report for name, report in functions.items() if name]

    def percent(covered: str, every: str) -> float:
        total = sum(body["summary"][every] for body in bodies)
        return 100.0 * sum(body["summary"][covered] for body in bodies) / total if total else 100.0

    return Covered(
        percent("covered_lines", "num_statements"),
        percent("covered_branches", "num_branches"),
        [line for body in bodies for line in body["missing_lines"]],
        [branch for body in bodies for branch in body["missing_branches"]],
    )


def kernel_modules() -> set[str]:
    """The modules with functions that ``triton.jit`` compiles."""
    return {path.stem for path in KERNELS.glob("*.py") if "@triton.jit" in path.read_text(encoding="utf-8")}


def claimed(test_module: Path) -> set[str]:
    """What a test module names in ``COVERS``, without importing it."""
    for node in ast.parse(test_module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["COVERS"]:
            return set(ast.literal_eval(node.value))
    return set()
