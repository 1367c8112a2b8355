"""A run at a glance: a line for each variable, with where its tokens came from and how long it took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from trellis.errors import ProgramError
from trellis.frontend.backends.base import Counts
from trellis.frontend.price import Price
from trellis.frontend.spans import Span, metas_of, total
from trellis.frontend.variable import Meta, Variable

_HEADINGS = (
    "variable",
    "kind",
    "prompt",
    "cached",
    "sampled",
    "forced",
    "passes",
    "seconds",
    "cost",
    "finish",
)


@dataclass(frozen=True)
class ReportRow:
    """variable: ``name``; ``name[i]`` for branch i of a joined one and sample i; ``name.key`` of a gathered one; and
    ``name (branch 0.1)`` of a branch whose variable is in none of the state's own. kind: ``gen`` | ``select``.

    saved_prompt_tokens: see ``Meta``. cost: in the unit of the price, None without one.
    """

    variable: str
    kind: str
    counts: Counts
    seconds: float
    finish_reason: str
    saved_prompt_tokens: int | None = None
    cost: float | None = None


@dataclass(frozen=True, repr=False)
class Report:
    """rows in the order in which the variables were appended; printing it draws the table."""

    program: str
    rows: tuple[ReportRow, ...]
    error: ProgramError | None = None

    @staticmethod
    def of(
        program: str,
        variables: list[Variable],
        branches: list[Span],
        error: ProgramError | None,
        price: Price | None = None,
    ) -> Report:
        """branches: what was asked in forks of the state."""
        named = [(variable.name or "(unnamed)", variable.meta) for variable in variables]
        listed = {id(meta) for _, each in named for meta in metas_of(each)}
        for span in branches:
            if not listed.issuperset(map(id, metas_of(span.meta))):
                branch = ".".join(map(str, span.lane))
                named.append((f"{span.name or '(unnamed)'} (branch {branch})", span.meta))
        return Report(program, tuple(row for name, meta in named for row in _rows(name, meta, price)), error)

    @property
    def total(self) -> Counts:
        """Sums over all rows."""
        return total(row.counts for row in self.rows)

    @property
    def seconds(self) -> float:
        """Of all rows; more than the time that has passed where they ran at once."""
        return sum(row.seconds for row in self.rows)

    @property
    def cost(self) -> float | None:
        """Of all rows; None without a price."""
        costs = [row.cost for row in self.rows if row.cost is not None]
        return sum(costs) if costs else None

    @property
    def saved_calls(self) -> int:
        """How many gens took text that an earlier call had written (API speculative execution)."""
        return sum(row.saved_prompt_tokens is not None for row in self.rows)

    @property
    def saved_prompt_tokens(self) -> int:
        """Prompt tokens that these did not send again."""
        return sum(row.saved_prompt_tokens or 0 for row in self.rows)

    def table(self) -> list[tuple[str, ...]]:
        """The headings, a line for each row, and the totals. Costs stand there if there is a price."""
        lines = [_cells(r.variable, r.kind, r.counts, r.seconds, r.cost, r.finish_reason) for r in self.rows]
        table = [_HEADINGS, *lines, _cells("total", "", self.total, self.seconds, self.cost, "")]
        priced, column = self.cost is not None, _HEADINGS.index("cost")
        return table if priced else [(*line[:column], *line[column + 1 :]) for line in table]

    def notes(self) -> list[str]:
        """What is to be said below the table."""
        saved = f"saved calls: {self.saved_calls}, prompt tokens: {self.saved_prompt_tokens}"
        return [*([saved] if self.saved_calls else []), *([f"failed: {self.error}"] if self.error else [])]

    def __str__(self) -> str:
        table = self.table()
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        rule = tuple("-" * width for width in widths)
        lines = [table[0], rule, *table[1:-1], rule, table[-1]]
        return "\n".join([*(_line(cells, widths) for cells in lines), *self.notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *body = self.table()
        rows = [_html_row("th", head), *(_html_row("td", cells) for cells in body)]
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes())
        return f"<table>{''.join(rows)}</table>{notes}"


def _rows(name: str, meta: object, price: Price | None) -> Iterator[ReportRow]:
    if isinstance(meta, list):
        for index, one in enumerate(meta):
            yield from _rows(f"{name}[{index}]", one, price)
    elif isinstance(meta, dict):  # of a program that was gathered
        for key, one in meta.items():
            yield from _rows(f"{name}.{key}", one, price)
    elif isinstance(meta, Meta):
        shown = "select" if type(meta) is not Meta else "gen"
        finish, saved = meta.finish_reason or "", meta.saved_prompt_tokens
        cost = None if price is None else price.of(meta.counts)
        yield ReportRow(name, shown, meta.counts, meta.seconds, finish, saved, cost)


def _cells(
    variable: str, kind: str, counts: Counts, seconds: float, cost: float | None, finish: str
) -> tuple[str, ...]:
    numbers = (
        counts.prompt_tokens,
        counts.cached_tokens,
        counts.sampled_tokens,
        counts.forced_tokens,
        counts.forward_passes,
    )
    paid = "" if cost is None else f"{cost:.6f}"
    return (variable, kind, *(str(number) for number in numbers), f"{seconds:.3f}", paid, finish)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    left = {0, 1, len(cells) - 1}
    padded = (
        c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(padded).rstrip()


def _html_row(tag: str, cells: tuple[str, ...]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
