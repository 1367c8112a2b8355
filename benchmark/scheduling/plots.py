"""Pictures of the results: hit rate over cache size, and time to first token by policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.scheduling.evaluate import Cell


def figures() -> Any:
    """matplotlib's Figure. SystemExit, with what to do, where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plots needs matplotlib, which is not installed: pip install matplotlib") from None
    return Figure


def write_plots(cells: Sequence[Cell], directory: Path) -> list[Path]:
    """One PNG of hit rates and one of times a trace; returns their paths."""
    figure_class = figures()
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for trace in dict.fromkeys(cell.trace for cell in cells):
        found = [cell for cell in cells if cell.trace == trace]
        for kind, draw in (("hit-rate", _hit_rates), ("ttft", _times)):
            figure = figure_class(figsize=(7, 4.5), layout="constrained")
            draw(figure.subplots(), found)
            written.append(directory / f"{trace}-{kind}.png")
            figure.savefig(written[-1], dpi=120)
    return written


def _hit_rates(axes: Any, cells: Sequence[Cell]) -> None:
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    for policy in policies:
        row = [cell for cell in cells if cell.policy == policy]
        axes.plot(
            [cell.size * 100 for cell in row], [cell.hit_rate * 100 for cell in row], "o-", label=policy
        )
    row = [cell for cell in cells if cell.policy == policies[0]]
    axes.plot([cell.size * 100 for cell in row], [cell.optimum * 100 for cell in row], "k--", label="optimum")
    axes.set(
        xscale="log",
        xlabel="cache, % of the working set",
        ylabel="hit rate, % of prompt tokens",
        ylim=(0, 100),
    )
    axes.set_xticks([cell.size * 100 for cell in row], [f"{cell.size:.0%}" for cell in row])
    axes.set_title(cells[0].trace)
    axes.legend()


def _times(axes: Any, cells: Sequence[Cell]) -> None:
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    sizes = sorted({cell.size for cell in cells})
    width = 0.8 / len(policies)
    for number, policy in enumerate(policies):
        row = [cell for cell in cells if cell.policy == policy]
        places = [sizes.index(cell.size) + (number - (len(policies) - 1) / 2) * width for cell in row]
        bars = axes.bar(places, [cell.ttft_mean for cell in row], width, label=policy)
        axes.plot(
            places, [cell.ttft_p99 for cell in row], "_", color=bars.patches[0].get_facecolor(), ms=9, mew=2
        )
    axes.set(xlabel="cache, % of the working set", ylabel="time to first token, s (bar: mean, dash: p99)")
    axes.set_xticks(range(len(sizes)), [f"{size:.0%}" for size in sizes])
    axes.set_title(cells[0].trace)
    axes.legend()
