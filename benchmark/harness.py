"""What every benchmark shares: alternating runs, medians, ratios, and a JSON line a result.

Machines drift, so two variants are never timed one after the other as blocks: they alternate, and what is
reported is the median of the pair-wise ratios and its spread.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Comparison:
    """base and ours: median seconds. ratio: median of base ÷ ours, pair by pair; low, high: its extremes."""

    name: str
    base: float
    ours: float
    ratio: float
    low: float
    high: float
    rounds: int
    note: str = ""

    def __str__(self) -> str:
        return (
            f"{self.name:<44} {self.base:9.3f} s {self.ours:9.3f} s   "
            f"{self.ratio:6.2f}x  ({self.low:.2f} - {self.high:.2f})  {self.note}"
        )


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(
    name: str, base: Callable[[], object], ours: Callable[[], object], rounds: int, note: str = ""
) -> Comparison:
    """Time base and ours in alternation, after one warm-up of each."""
    base()
    ours()
    pairs = []
    for i in range(rounds):
        first, second = (base, ours) if i % 2 == 0 else (ours, base)
        one, two = seconds(first), seconds(second)
        pairs.append((one, two) if i % 2 == 0 else (two, one))
    ratios = [b / o for b, o in pairs]
    return Comparison(
        name,
        statistics.median(b for b, _ in pairs),
        statistics.median(o for _, o in pairs),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        rounds,
        note,
    )


def report(benchmark: str, comparisons: list[Comparison], header: str) -> None:
    """Print a table and append one JSON line a comparison to benchmark/results/."""
    print(header)
    for comparison in comparisons:
        print(comparison)
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{benchmark}.jsonl").open("a", encoding="utf-8") as lines:
        for comparison in comparisons:
            record = {
                "at": time.strftime("%Y-%m-%dT%H:%M:%S"),
                "machine": platform.processor(),
                **asdict(comparison),
            }
            lines.write(json.dumps(record) + "\n")
