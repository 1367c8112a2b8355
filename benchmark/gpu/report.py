"""What the check found: a line for each thing, as a table and as JSON."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OK, FAILED, MISSED, MEASURED, SKIPPED = "ok", "FAILED", "missed", "measured", "skipped"


@dataclass(frozen=True)
class Line:
    """status: ``ok`` (right, or its bar is met), ``FAILED`` (wrong), ``missed`` (right, but its bar is not met), ``measured`` (has
    no bar), ``skipped``. value: in ``unit``; bar: what it should be, in words."""

    section: str
    name: str
    status: str
    value: float | None = None
    unit: str = ""
    bar: str = ""
    note: str = ""

    def __str__(self) -> str:
        value = "" if self.value is None else f"{self.value:,.4g} {self.unit}".rstrip()
        bar = f"bar {self.bar}" if self.bar else ""
        return (
            f"{self.section:<9} {self.name:<52} {self.status:<9} {value:<16} {bar:<10} {self.note}".rstrip()
        )


@dataclass
class Report:
    """about: of the machine. budget_s: no section begins after so many seconds."""

    about: dict[str, Any]
    budget_s: float
    lines: list[Line] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    def add(self, line: Line) -> None:
        self.lines.append(line)
        print(line, flush=True)

    def right(self, section: str, name: str, ok: bool, note: str = "") -> None:
        """Something that is right or wrong."""
        self.add(Line(section, name, OK if ok else FAILED, note=note))

    def at_least(self, section: str, name: str, value: float, bar: float, unit: str, note: str = "") -> None:
        self.add(Line(section, name, OK if value >= bar else MISSED, value, unit, f">= {bar:g}", note))

    def at_most(self, section: str, name: str, value: float, bar: float, unit: str, note: str = "") -> None:
        self.add(Line(section, name, OK if value <= bar else MISSED, value, unit, f"<= {bar:g}", note))

    def figure(self, section: str, name: str, value: float, unit: str, note: str = "") -> None:
        self.add(Line(section, name, MEASURED, value, unit, note=note))

    def skip(self, section: str, name: str, why: str) -> None:
        self.add(Line(section, name, SKIPPED, note=why))

    def run(self, section: str, work: Callable[[], None]) -> None:
        """A section. What it raises is a failure of its own, and the next ones are run."""
        spent = time.monotonic() - self._began
        if spent > self.budget_s:
            self.skip(
                section, "all of it", f"{spent:.0f} s were spent by then; --budget is {self.budget_s:g}"
            )
            return
        began = time.monotonic()
        try:
            work()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            note = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            self.add(Line(section, "did not come to its end", FAILED, note=note.replace("\n", " ")[:400]))
            traceback.print_exc()
        self.seconds[section] = time.monotonic() - began

    @property
    def failed(self) -> bool:
        return any(line.status == FAILED for line in self.lines)

    def summary(self) -> str:
        counts = {
            status: sum(line.status == status for line in self.lines)
            for status in (OK, MEASURED, MISSED, SKIPPED, FAILED)
        }
        times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.seconds.items())
        return f"{', '.join(f'{n} {status}' for status, n in counts.items())}; {times}"

    def write(self, path: Path) -> None:
        data = {"about": self.about, "seconds": self.seconds, "lines": [asdict(line) for line in self.lines]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
