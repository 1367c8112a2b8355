"""Tables of results, and the few figures that sum them up."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from benchmark.scheduling.evaluate import BASELINES, Cell
from benchmark.scheduling.workloads import MIXED

HEAD = (
    f"{'policy':12}{'hit %':>8}{'÷ opt %':>9}{'÷ evict %':>10}{'computed':>11}{'TTFT s':>9}{'p99 s':>9}"
    f"{'retract':>8}{'µs/step':>9}{'µs/req':>8}"
)
COLUMNS = """\
hit %: prompt tokens found in the cache. ÷ opt: as a share of the optimum taken, which is what no schedule can pass,
or, for mixed arrivals, what the best eviction finds in the best of the orders played. ÷ evict: as a share of what the best
eviction finds in the order in which this policy ran the calls. computed: prompt tokens. TTFT, p99: virtual time to the first
token, mean and 99th percentile. µs/step, µs/req: real time of the scheduler, for a step and for a running request in it.
no-tree: only whole earlier prompts are found, with or without their outputs. no-cache: nothing is."""


def title(cell: Cell) -> str:
    return (
        f"\n{cell.trace}, cache {cell.size:.0%} of the working set ({cell.capacity:,} tokens): no schedule can find more "
        f"than {cell.bound:.1%}, off-line {cell.offline:.1%}, optimum taken {cell.optimum:.1%}\n{HEAD}"
    )


def line(cell: Cell) -> str:
    evictions = f"{cell.hit_rate / cell.evictions if cell.evictions else 1.0:.1%}"
    return (
        f"{cell.policy:12}{cell.hit_rate:>8.1%}{cell.ratio:>9.1%}"
        f"{evictions if cell.policy not in BASELINES else '–':>10}{cell.computed:>11,}"
        f"{cell.ttft_mean:>9.3f}{cell.ttft_p99:>9.3f}{cell.retractions:>8}"
        f"{cell.cpu_step * 1e6:>9.0f}{cell.cpu_request * 1e6:>8.1f}"
    )


def print_cells(cells: Iterable[Cell]) -> list[Cell]:
    """Print them as they come; returns all."""
    seen: list[Cell] = []
    for cell in cells:
        if not seen or (seen[-1].trace, seen[-1].size) != (cell.trace, cell.size):
            print(title(cell))
        print(line(cell), flush=True)
        seen.append(cell)
    return seen


def summary(cells: Sequence[Cell]) -> list[str]:
    """Hit rate ÷ optimum by policy and size, averaged over the traces; what is below the bars; the mixed trace."""
    sizes = sorted({cell.size for cell in cells})
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    lines = [
        "\nhit rate ÷ optimum, average over the traces, by cache size",
        f"{'policy':12}" + "".join(f"{size:>9.0%}" for size in sizes) + f"{'≥ 50 %':>9}",
    ]
    for policy in policies:
        values = [_mean(cells, policy, lambda size, s=size: size == s) for size in sizes]
        values.append(_mean(cells, policy, lambda size: size >= 0.5))
        lines.append(f"{policy:12}" + "".join(f"{value:>9.1%}" for value in values))
    lines += _mixed(cells)
    weak = [
        f"  {cell.trace} at {cell.size:.0%}: {cell.ratio:.1%}"
        for cell in cells
        if cell.policy == "lpm" and cell.size >= 0.2 and cell.ratio < (0.98 if cell.size >= 0.5 else 0.95)
    ]
    return lines + (["\nlpm below 98 % (95 % at 20 %):", *weak] if weak else [])


def _mean(cells: Sequence[Cell], policy: str, fits: object) -> float:
    assert callable(fits)
    found = [cell.ratio for cell in cells if cell.policy == policy and fits(cell.size)]
    return statistics.mean(found) if found else float("nan")


def _mixed(cells: Sequence[Cell]) -> list[str]:
    lines = ["\nmixed arrivals, time to first token of lpm: p99 ÷ fcfs, mean ÷ best policy"]
    found = [cell for cell in cells if cell.trace == MIXED and cell.policy not in BASELINES]
    for size in sorted({cell.size for cell in found}):
        row = {cell.policy: cell for cell in found if cell.size == size}
        if "lpm" in row and "fcfs" in row:
            best = min(row.values(), key=lambda cell: cell.ttft_mean)
            lines.append(
                f"  cache {size:>4.0%}: {row['lpm'].ttft_p99 / row['fcfs'].ttft_p99:.2f}   "
                f"{row['lpm'].ttft_mean / best.ttft_mean:.2f} ({best.policy})"
            )
    return lines if len(lines) > 1 else []
