"""In which order waiting requests are admitted.

A policy is a function from a ``QueueView`` (columns of plain numbers, one row a waiting request, oldest
first) to the order in which rows are tried. To add one, write the function and give it a line in ``POLICIES``::

    def shortest_prompt_first(queue: QueueView) -> Order:
        return np.argsort(queue.prompt_tokens, kind="stable")

    "spf": Policy(shortest_prompt_first),

One that reads ``cached_tokens`` is registered with ``cache_aware=True``.

Priorities are not a policy's business: ``order`` sorts stably by priority afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from trellis.errors import InvalidRequestError

Order = npt.NDArray[np.intp]


@dataclass(frozen=True)
class QueueView:
    """The waiting requests, oldest first; every array has one entry a request.

    waited_s: seconds since arrival. prompt_tokens: tokens to have before the first token can be sampled.
    cached_tokens: how many of them the cache holds now (0 for policies that do not ask).
    max_new_tokens: most tokens of output. priority: higher first.
    max_overtake_s: bound that cache-aware policies keep (see ``SchedulerConfig``).
    """

    waited_s: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]
    max_new_tokens: npt.NDArray[np.int64]
    priority: npt.NDArray[np.int64]
    max_overtake_s: float

    def __len__(self) -> int:
        return len(self.waited_s)


@dataclass(frozen=True)
class Policy:
    """order: the function. cache_aware: does it read cached_tokens? (Then they are looked up, which costs.)"""

    order: Callable[[QueueView], Order]
    cache_aware: bool = False


def fcfs(queue: QueueView) -> Order:
    """First come, first served."""
    return np.arange(len(queue))


def lpm(queue: QueueView) -> Order:
    """Longest prefix match first: what is in the cache is used before it can be evicted.

    For a fixed set of requests this order reaches the best possible hit rate (Zheng et al. 2024,
    arXiv:2312.07104, theorem 3.1). Requests that have waited for max_overtake_s come before all others, in
    order of arrival, so a request without a cached prefix is overtaken for no longer than that.
    """
    aged = queue.waited_s >= queue.max_overtake_s
    cached = np.where(aged, 0, queue.cached_tokens)
    return np.lexsort((np.arange(len(queue)), -cached, ~aged))


POLICIES: Final[Mapping[str, Policy]] = {
    "fcfs": Policy(fcfs),
    "lpm": Policy(lpm, cache_aware=True),
}


def find_policy(name: str) -> Policy:
    """The policy of that name; InvalidRequestError names the ones there are."""
    if name not in POLICIES:
        raise InvalidRequestError("policy", f"unknown policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]


def order(policy: Policy, queue: QueueView) -> Order:
    """Rows in the order of admission: by priority, then as the policy says."""
    rows = policy.order(queue)
    return rows[np.argsort(-queue.priority[rows], kind="stable")]
