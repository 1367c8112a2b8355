"""A run at a glance: a line for each variable, with where its tokens came from and how long it took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from trellis.errors import ProgramError
from trellis.frontend.backends.base import Counts
from trellis.frontend.variable import Meta, Variable

_HEADINGS = ("variable", "kind", "prompt", "cached", "sampled", "forced", "passes", "seconds", "finish")


@dataclass(frozen=True)
class ReportRow:
    """variable: ``name``, or ``name[i]`` for branch i of a joined one. kind: ``gen`` | ``select``."""

    variable: str
    kind: str
    counts: Counts
    seconds: float
    finish_reason: str


@dataclass(frozen=True)
class Report:
    """rows in the order in which the variables were appended; ``str()`` draws the table."""

    program: str
    rows: tuple[ReportRow, ...]
    error: ProgramError | None = None

    @staticmethod
    def of(program: str, variables: list[Variable], error: ProgramError | None) -> Report:
        rows = [row for variable in variables for row in _rows(variable.name or "(unnamed)", variable.meta)]
        return Report(program, tuple(rows), error)

    @property
    def total(self) -> Counts:
        """Sums over all rows."""
        names = [f.name for f in fields(Counts)]
        return Counts(**{name: sum(getattr(row.counts, name) for row in self.rows) for name in names})

    def __str__(self) -> str:
        lines = [_cells(r.variable, r.kind, r.counts, f"{r.seconds:.3f}", r.finish_reason) for r in self.rows]
        lines.append(_cells("total", "", self.total, "", ""))
        widths = [max(len(line[i]) for line in [_HEADINGS, *lines]) for i in range(len(_HEADINGS))]
        rule = tuple("-" * width for width in widths)
        table = [_HEADINGS, rule, *lines[:-1], rule, lines[-1]]
        text = "\n".join(_line(cells, widths) for cells in table)
        return f"{text}\nfailed: {self.error}" if self.error else text


def _rows(name: str, meta: object) -> Iterator[ReportRow]:
    if isinstance(meta, list):
        for index, one in enumerate(meta):
            yield from _rows(f"{name}[{index}]", one)
    elif isinstance(meta, Meta):
        shown = "select" if type(meta) is not Meta else "gen"
        yield ReportRow(name, shown, meta.counts, meta.seconds, meta.finish_reason or "")


def _cells(variable: str, kind: str, counts: Counts, seconds: str, finish: str) -> tuple[str, ...]:
    numbers = (
        counts.prompt_tokens,
        counts.cached_tokens,
        counts.sampled_tokens,
        counts.forced_tokens,
        counts.forward_passes,
    )
    return (variable, kind, *(str(number) for number in numbers), seconds, finish)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    left = {0, 1, len(cells) - 1}
    padded = (
        c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(padded).rstrip()
