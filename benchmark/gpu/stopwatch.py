"""Times of the device's own work, by events in its stream; on a CPU, by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch


class Stopwatch:
    """Of one device: CUDA, or a CPU (where work is done when the call returns)."""

    def __init__(self, where: torch.device) -> None:
        self._cuda = where.type == "cuda"
        self._where = where

    def mark(self) -> Any:
        """A point in the device's work, to be given to ``between``."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        """Seconds of the device between two marks; both must have been reached (``wait``)."""
        return first.elapsed_time(second) / 1e3 if self._cuda else second - first

    def reached(self, mark: Any) -> bool:
        """Whether the device has come to that point."""
        return not self._cuda or bool(mark.query())

    def wait(self) -> None:
        """For all that was launched."""
        if self._cuda:
            torch.cuda.synchronize(self._where)

    def seconds(self, work: Callable[[], object], repeats: int = 10, warm_ups: int = 3) -> float:
        """Median time of one ``work`` on the device. What of it is launched late counts."""
        for _ in range(warm_ups):
            work()
        marks: Sequence[Any] = [self._after(work) for _ in range(repeats + 1)]
        self.wait()
        return statistics.median(self.between(a, b) for a, b in pairwise(marks))

    def _after(self, work: Callable[[], object]) -> Any:
        work()
        return self.mark()
