"""Which running requests give way when the pool is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Victim:
    """A running request as retraction sees it.

    priority: higher ones stay longer. cost: tokens that only it holds: what giving way makes available, and
    what it may have to compute again. demand: slots that it wants in this step. order: of arrival.
    """

    priority: int
    cost: int
    demand: int
    order: int


def choose_victims(running: Sequence[Victim], need: int) -> list[int]:
    """Indices of the requests to retract so that ``need`` more slots are available, at least cost.

    The lowest priority and the least cost goes first, of equals the youngest. The last of this order always
    stays, so fewer slots may come free than are needed. Those that turn out not to be needed, because a
    later one frees enough, stay as well.
    """
    falling = sorted(
        range(len(running)), key=lambda i: (running[i].priority, running[i].cost, -running[i].order)
    )
    chosen: list[int] = []
    gained = 0
    for index in falling[:-1]:
        if gained >= need:
            break
        chosen.append(index)
        gained += running[index].cost + running[index].demand
    for index in list(chosen):
        gain = running[index].cost + running[index].demand
        if gained - gain >= need and len(chosen) > 1:
            chosen.remove(index)
            gained -= gain
    return chosen
