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
    activations: the most that a step holds at one time."""

    total: int
    fraction: float
    used: int
    activations: int
    token_bytes: int

    @property
    def slots(self) -> int:
        """Of the pool, the padding sink not counted."""
        free = int(self.total * self.fraction) - self.used - self.activations
        return max(0, free // self.token_bytes - 1)

    @property
    def planned(self) -> int:
        """What will be taken while the largest step runs."""
        return self.used + self.activations + (self.slots + 1) * self.token_bytes

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


def largest_extends(chunk: int, running: int, rows: int) -> list[Extend]:
    """The largest step that the scheduler plans: ``chunk`` prompt tokens beside one token of each of ``running`` requests, and
    the logits of ``rows`` positions, or of all if there are fewer. Slots 1 … chunk + running are written."""
    scored = min(chunk, max(1, rows - running))
    slots = np.arange(1, chunk + running + 1, dtype=np.int32)
    prefill = Extend(np.zeros(chunk, np.int32), 0, slots[:chunk], chunk - scored)
    decodes = [
        Extend(np.zeros(1, np.int32), 0, slots[at : at + 1], 0) for at in range(chunk, chunk + running)
    ]
    return [prefill, *decodes]
