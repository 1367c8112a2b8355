"""Groups without processes, and steps that exercise a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from trellis.runtime.executor.contract import NO_PLACE, Extend
from trellis.runtime.executor.model_runner import StepRunner
from trellis.runtime.executor.step import LogitsRows

T = TypeVar("T")
VOCAB = 319  # tokens that every tiny model has


@dataclass(frozen=True)
class Seat:
    """A place in a group of which nobody else is there: enough to load a part."""

    rank: int
    size: int

    def wait_for_all(self) -> None:
        pass


class ThreadRanks(Seat):
    """One rank of a group of threads."""

    def __init__(self, rank: int, barrier: threading.Barrier, parts: list[Tensor]) -> None:
        super().__init__(rank, barrier.parties)
        self.__dict__.update(barrier=barrier, parts=parts)

    barrier: threading.Barrier
    parts: list[Tensor]

    def sum(self, partial: Tensor) -> Tensor:
        return torch.stack(self._all(partial)).sum(0)

    def join(self, part: Tensor) -> Tensor:
        everybody = self._all(part)
        return torch.cat(everybody, -1) if self.rank == 0 else part

    def _all(self, own: Tensor) -> list[Tensor]:
        self.parts[self.rank] = own
        self.barrier.wait(60)
        everybody = list(self.parts)
        self.barrier.wait(60)
        return everybody


class ThreadGroup(ThreadRanks):
    """What ``Group`` is, of threads. shared: how many tokens of rank 0's device the others got."""

    shared = 0

    def share_followed(self, tokens: Tensor | None, extends: Sequence[Extend]) -> None:
        assert tokens is not None
        count = max(extend.follows for extend in extends) + 1
        if count:
            tokens[:count] = self._all(tokens[:count].clone())[0]
            self.__dict__["shared"] = self.shared + count

    def meet(self) -> None:
        self._all(torch.empty(0))


def in_threads(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """What each rank returns."""
    barrier, parts = threading.Barrier(size), [torch.empty(0)] * size

    def run(rank: int) -> T:
        try:
            return work(ThreadGroup(rank, barrier, parts))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def steps_of_a_session(seed: int = 3) -> list[list[Extend]]:
    """A ragged batch with a shared prefix, then a chunk that goes on, decodes, and a request that finds a cached prefix."""
    random = np.random.default_rng(seed)
    slots = random.permutation(np.arange(1, 200, dtype=np.int32))

    def extend(start: int, n: int, own: np.ndarray, logits_from: int = 0) -> Extend:
        return Extend(random.integers(0, VOCAB, n).astype(np.int32), start, own[: start + n], logits_from)

    first, second = slots[:40], slots[40:80]
    sharer = np.concatenate([first[:10], slots[80:100]])
    later = np.concatenate([second[:20], slots[100:120]])
    return [
        [extend(0, 12, first), extend(0, 20, second, 19), extend(10, 3, sharer)],
        [extend(12, 9, first), extend(20, 1, second), extend(13, 1, sharer)],
        [extend(21, 1, first), extend(20, 5, later, 5), extend(21, 1, second), extend(14, 1, sharer)],
        [extend(25, 1, later), extend(15, 1, sharer), extend(22, 1, first)],
    ]


class FollowingStep:
    """As a device does it: the first token of an extend that follows a place is what stands there by then."""

    name = "following"

    def __init__(self, runner: StepRunner, tokens: list[int]) -> None:
        self._step = runner.step
        runner.followed = self.table = torch.tensor(tokens)

    def forward(self, extends: Sequence[Extend]) -> LogitsRows:
        filled = []
        for extend in extends:
            token_ids = extend.token_ids.copy()
            if extend.follows != NO_PLACE:
                token_ids[0] = self.table[extend.follows]
            filled.append(replace(extend, token_ids=token_ids))
        return self._step.forward(filled)


def logits_of(forward: Callable[[list[Extend]], Tensor]) -> Tensor:
    return torch.cat([forward(extends) for extends in steps_of_a_session()])
