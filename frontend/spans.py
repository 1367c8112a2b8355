"""When each gen and select was appended, sent, answered and done: what timelines and progress bars are made of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trellis.frontend.backends.base import Counts


@dataclass(slots=True, eq=False)
class Span:
    """One gen or select. Times are of ``time.perf_counter``, in seconds, None for what has not come about.

    lane: which branch: () for the program's own state, (1,) for its second branch, (1, 0) for the first of that one.
    queued: appended. sent: its turn came, and the request went out. first: the first text came, of a streamed gen.
    done: it has its value, or was ended by a failure: failed. counts: of all its samples. meta: of the variable.
    """

    name: str | None
    kind: str
    lane: tuple[int, ...] = ()
    queued: float = field(default_factory=time.perf_counter)
    sent: float | None = None
    first: float | None = None
    done: float | None = None
    failed: bool = False
    counts: Counts = field(default_factory=Counts)
    finish_reason: str | None = None
    text: str = ""
    meta: Any = None

    def send(self) -> None:
        self.sent = time.perf_counter()

    def see(self) -> None:
        """Text has come."""
        if self.first is None:
            self.first = time.perf_counter()

    def finish(self, text: Any, meta: Any) -> None:
        self.done, self.meta = time.perf_counter(), meta
        metas = list(metas_of(meta))
        self.counts = metas[0].counts if len(metas) == 1 else total(each.counts for each in metas)
        self.finish_reason = metas[0].finish_reason if metas else None
        self.text = shortened(text if isinstance(text, str) else " | ".join(map(str, text)))

    def fail(self) -> None:
        if self.done is None:
            self.done, self.failed = time.perf_counter(), True


def metas_of(meta: Any) -> Iterator[Any]:
    """The ``Meta`` of each sample, branch and gathered variable, in order."""
    if isinstance(meta, (list, dict)):
        for one in meta.values() if isinstance(meta, dict) else meta:
            yield from metas_of(one)
    elif meta is not None:
        yield meta


def total(counts: Iterator[Counts]) -> Counts:
    """The sum of each count."""
    names = Counts.__dataclass_fields__
    sums = dict.fromkeys(names, 0)
    for each in counts:
        for name in names:
            sums[name] += getattr(each, name)
    return Counts(**sums)


def shortened(text: str, limit: int = 200) -> str:
    """At most so many characters, for people to see."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
