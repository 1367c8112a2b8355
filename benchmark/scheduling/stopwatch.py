"""Where the time of ``Scheduler.step`` goes: planning, compute glue, commit and the rest, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmark.scheduling.model import TraceRunner
from trellis.radix import RadixCache
from trellis.runtime.messages import TokenOutput
from trellis.runtime.scheduler import Scheduler
from trellis.runtime.scheduler import scheduler as scheduler_module
from trellis.runtime.scheduler.planner import Planner

Parts = tuple[tuple[str, Any, str], ...]
"""What is timed: a name, and the object and attribute under which the function is found."""

PARTS: Parts = (
    ("planning", Planner, "fill"),
    ("compute", scheduler_module, "compute"),
    ("commit", scheduler_module, "commit"),
)

TREE: Parts = tuple(
    ("tree", RadixCache, operation)
    for operation in ("match", "peek", "insert", "lock", "unlock", "evict", "discard")
)

COLUMNS = ("planning", "compute glue", "commit", "emit", "step")


@dataclass
class Stopwatch:
    """spent: seconds in each part since ``reset``, by ``clock``."""

    spent: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.thread_time

    def reset(self) -> None:
        self.spent = dict.fromkeys(self.spent, 0.0)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed_function(*args: Any, **kwargs: Any) -> Any:
            began = self.clock()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[name] += self.clock() - began

        return timed_function


@contextmanager
def watching(parts: Parts = PARTS, clock: Callable[[], float] = time.thread_time) -> Iterator[Stopwatch]:
    """Time the parts of every step taken inside the block: by default in CPU seconds of this thread, which other work on
    the machine does not prolong. Raises AttributeError where a part has another name now."""
    watch = Stopwatch(dict.fromkeys((name for name, _, _ in parts), 0.0), clock)
    originals = [(owner, attribute, getattr(owner, attribute)) for _, owner, attribute in parts]
    try:
        for (name, owner, attribute), (_, _, function) in zip(parts, originals, strict=True):
            setattr(owner, attribute, watch.timed(name, function))
        yield watch
    finally:
        for owner, attribute, function in originals:
            setattr(owner, attribute, function)


def timed_step(
    scheduler: Scheduler, runner: TraceRunner, watch: Stopwatch
) -> tuple[list[TokenOutput], dict[str, float]]:
    """One step: its outputs, and seconds by ``COLUMNS``."""
    watch.reset()
    busy = runner.busy
    began = watch.clock()
    outputs = scheduler.step()
    model = runner.busy - busy
    total = watch.clock() - began - model
    planning, commit = watch.spent["planning"], watch.spent["commit"]
    glue = watch.spent["compute"] - model
    emit = total - planning - glue - commit
    return outputs, dict(zip(COLUMNS, (planning, glue, commit, emit, total), strict=True))
