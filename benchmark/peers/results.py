"""What a run leaves: lines on the terminal, and every sample in a JSON-lines file."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from benchmark.peers.engines import PEERS
from benchmark.peers.measure import Ratio, Sample

FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm")


@dataclass(frozen=True)
class Missing:
    """engine: or environment. workload: "" if the engine could not be started at all."""

    engine: str
    workload: str
    reason: str


@dataclass
class Results:
    """One run. Each thing is written and printed when it is known, so that a run that is cut short leaves what it had."""

    lines: TextIO
    ratios: list[Ratio] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    def begin(self, **about: Any) -> None:
        about = {"at": time.strftime("%Y-%m-%dT%H:%M:%S"), **machine(), **about}
        self._write("run", about)
        print(" · ".join(f"{key} {value}" for key, value in about.items()))

    def started(self, engine: str, version: str) -> None:
        self._write("engine", {"engine": engine, "version": version})
        print(f"{engine}: {version}", flush=True)

    def add(self, ratio: Ratio, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self._write("sample", asdict(sample))
        self.ratios.append(ratio)
        self._write("ratio", asdict(ratio))
        print(ratio_line(ratio), flush=True)

    def lacks(self, engine: str, workload: str, reason: str) -> None:
        self.missing.append(Missing(engine, workload, reason))
        self._write("missing", asdict(self.missing[-1]))
        print(f"  {workload:<22} {engine}: {reason}", flush=True)

    def summary(self) -> str:
        """Against the best peer of each workload, and what is missing."""
        lines = [HEADER, *(ratio_line(each) for each in self.ratios)]
        for bits, title in ((16, "the best peer at 16 bits"), (None, "the best peer of any precision")):
            best = best_peers(self.ratios, bits)
            if best:
                lines += ["", f"against {title}:", *(ratio_line(each) for each in best)]
        if self.missing:
            lines += ["", "missing:"]
            lines += [f"  {each.engine} {each.workload}: {each.reason}" for each in self.missing]
        return "\n".join(lines)

    def _write(self, kind: str, record: dict[str, Any]) -> None:
        self.lines.write(json.dumps({"kind": kind, **record}) + "\n")
        self.lines.flush()


HEADER = f"{'':<24} {'':<15} {'Trellis':>10} {'peer':>10}   ratio (spread; above 1: Trellis is better)"


def ratio_line(each: Ratio) -> str:
    spread = f"{each.ratio:6.2f}x  ({each.low:.2f} - {each.high:.2f})"
    valid = (
        ""
        if each.valid == (each.requests,) * 2
        else f"  valid {each.valid[0]}, {each.valid[1]} of {each.requests}"
    )
    figures = f"{each.ours:10.2f} {each.theirs:10.2f} {spread}"
    return f"  {each.workload:<22} {each.unit:<15} {figures}  {each.trellis} ÷ {each.peer}{valid}"


def best_peers(ratios: Sequence[Ratio], bits: int | None) -> list[Ratio]:
    """Of each workload and each Trellis the lowest ratio among the peers of that precision."""
    found: dict[tuple[str, str], Ratio] = {}
    for each in ratios:
        if each.peer in PEERS and bits in (None, PEERS[each.peer].bits):
            at = (each.trellis, each.workload)
            if at not in found or each.ratio < found[at].ratio:
                found[at] = each
    return list(found.values())


def machine() -> dict[str, Any]:
    """load: of the last minute, before the run: above about 0.5, others disturb the figures."""
    model, flags = platform.processor() or platform.machine(), ""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = value
    except OSError:
        pass
    has = set(flags.split())
    return {
        "machine": model,
        "features": " ".join(each for each in FEATURES if each in has),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }
