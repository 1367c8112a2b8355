"""How many token slots fit on a device: what is left when the weights are there and the largest step has its room."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trellis.errors import CapacityError
from trellis.runtime.executor.contract import Extend

GIB = 1 << 30
FEWEST_SLOTS = 256


@dataclass(frozen=True)
class PoolPlan:
    """Bytes, but for fraction and slots. used: taken before there is a pool: weights, what CUDA itself needs, other processes.
    activations: the most that a step holds at one time. page_size: of the pool, in slots."""

    total: int
    fraction: float
    used: int
    activations: int
    token_bytes: int
    page_size: int = 1

    @property
    def slots(self) -> int:
        """Of the pool: whole pages, the padding sink's not counted."""
        free = int(self.total * self.fraction) - self.used - self.activations
        return max(0, free // (self.token_bytes * self.page_size) - 1) * self.page_size

    @property
    def planned(self) -> int:
        """What will be taken while the largest step runs."""
        return self.used + self.activations + (self.slots + self.page_size) * self.token_bytes

    def describe(self) -> str:
        return (
            f"{self.used / GIB:.2f} GiB of weights and CUDA, {self.activations / GIB:.2f} GiB for the largest step, "
            f"{self.slots * self.token_bytes / GIB:.2f} GiB of K/V for {self.slots} tokens, of {self.total / GIB:.2f} GiB"
        )

    def check(self, device: str) -> None:
        """CapacityError if nothing worth speaking of is left for the pool. device: its name."""
        if self.slots < FEWEST_SLOTS:
            raise CapacityError(
                f"there is no room for a K/V pool on {device}: {self.describe()}, of which a share of {self.fraction} may be "
                "used; raise --mem-fraction-static, lower --chunked-prefill-size, or take a smaller model",
                status=500,
            )


def largest_slots(chunk: int, running: int, page_size: int = 1) -> int:
    """Of a pool that ``largest_extends`` fit in."""
    return (-(-chunk // page_size) + running) * page_size


def largest_extends(chunk: int, running: int, rows: int, page_size: int = 1) -> list[Extend]:
    """The largest step that the scheduler plans: ``chunk`` prompt tokens beside one token of each of ``running`` requests, and
    the logits of ``rows`` positions, or of all if there are fewer. Each has pages of its own, from page 1 on."""
    scored = min(chunk, max(1, rows - running))
    slots = np.arange(page_size, page_size + largest_slots(chunk, running, page_size), dtype=np.int32)
    prefill = Extend(np.zeros(chunk, np.int32), 0, slots[:chunk], chunk - scored)
    firsts = slots[len(slots) - running * page_size :: page_size]
    decodes = [Extend(np.zeros(1, np.int32), 0, firsts[at : at + 1], 0) for at in range(running)]
    return [prefill, *decodes]
