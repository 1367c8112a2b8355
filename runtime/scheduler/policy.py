"""In which order waiting requests are admitted.

A policy is a function from a ``QueueView`` (columns of plain numbers, one row a waiting request) to the order in
which rows are tried. To add one, write the function and give it a line in ``POLICIES``::

    def shortest_prompt_first(queue: QueueView) -> Order:
        return np.argsort(queue.prompt_tokens, kind="stable")

    "spf": Policy(shortest_prompt_first),

Or leave this file alone: put ``spf = Policy(shortest_prompt_first)`` into a module ``mine`` of your own and start
with the policy ``mine:spf``.

Priorities and ageing are not a policy's business: ``order`` sees to the first, and ``Lineup`` to the second, with a
bound that holds whatever the policy says. So no policy can starve a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final

import numpy as np
import numpy.typing as npt

from trellis.errors import InvalidRequestError

Order = npt.NDArray[np.intp]

# Multipliers of splitmix64 (Steele et al. 2014), which turns counts into numbers without a pattern.
_ODD: Final = np.array(
    [0xD1B54A32D192ED03, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64
)


@dataclass(frozen=True)
class QueueView:
    """The waiting requests, the highest priority first and of equals the oldest; one entry a request.

    number: counts requests as they arrive, so it names one as long as it lives.
    waited_s: seconds since arrival. prompt_tokens: tokens to have before the first token can be sampled.
    cached_tokens: how many of them the cache holds now. path: the tree nodes that hold these, from the root down,
        as numbers that are equal for the same node; the last one may be held in part only. (Zeros and empty
        paths for policies that do not ask.)
    max_new_tokens: most tokens of output. expected_tokens: how many are expected.
    priority: higher first. seed: for policies that draw lots.
    """

    number: npt.NDArray[np.int64]
    waited_s: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]
    path: Sequence[Sequence[int]]
    max_new_tokens: npt.NDArray[np.int64]
    expected_tokens: npt.NDArray[np.int64]
    priority: npt.NDArray[np.int64]
    seed: int = 0

    def __len__(self) -> int:
        return len(self.number)


@dataclass(frozen=True)
class Policy:
    """A policy and what it needs.

    order: the function. cache_aware: does it read cached_tokens? reads_path: does it read path? (Both are looked
    up only then, as it costs.) strict: a request that can not be admitted yet holds up all that come after it;
    else those that fit may pass it, until it has waited too long.
    """

    order: Callable[[QueueView], Order]
    cache_aware: bool = False
    reads_path: bool = False
    strict: bool = False


def fcfs(queue: QueueView) -> Order:
    """First come, first served."""
    return np.arange(len(queue))


def lpm(queue: QueueView) -> Order:
    """Longest prefix match first: what is in the cache is used before it can be evicted.

    For a fixed set of requests this order reaches the best possible hit rate (Zheng et al. 2024,
    arXiv:2312.07104, theorem 3.1).
    """
    return np.argsort(-queue.cached_tokens, kind="stable")


def dfs_weight(queue: QueueView) -> Order:
    """Depth first through the prefix tree, subtrees with more waiting requests first.

    Requests that share a prefix come together, the deepest first; those that share nothing come last.
    (Theorem 3.1 of the same paper, on line.)
    """
    weight = Counter(node for path in queue.path for node in path)
    after_children = (1, 0)  # sorts behind every child, whose first number is negative
    place = [[*((-weight[node], node) for node in path), after_children] for path in queue.path]
    return np.array(sorted(range(len(queue)), key=place.__getitem__), np.intp)


def lof(queue: QueueView) -> Order:
    """Longest output first: long requests do not straggle behind when the queue is a batch to get done."""
    return np.argsort(-queue.max_new_tokens, kind="stable")


def random(queue: QueueView) -> Order:
    """Drawn by lot: the same for the same seed and arrivals, whenever it is asked. To compare others with."""
    start = np.array([queue.seed % 2**32], np.uint64) * _ODD[0]
    z = (queue.number.astype(np.uint64) + start) * _ODD[1]
    z = (z ^ (z >> np.uint64(30))) * _ODD[2]
    z = (z ^ (z >> np.uint64(27))) * _ODD[3]
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable")


def hrrn(queue: QueueView) -> Order:
    """Highest response ratio next: short work first, and whatever has waited long for its size.

    The ratio (waited + service) / service, where the service is the uncached prompt and the expected output.
    How many seconds a token takes does not change the order, so it is left out; of equals the shortest first.
    """
    service = np.maximum(1, queue.prompt_tokens - queue.cached_tokens + queue.expected_tokens)
    return np.lexsort((service, -queue.waited_s / service))


POLICIES: Final[Mapping[str, Policy]] = {
    "lpm": Policy(lpm, cache_aware=True),
    "dfs-weight": Policy(dfs_weight, cache_aware=True, reads_path=True),
    "fcfs": Policy(fcfs, strict=True),
    "lof": Policy(lof),
    "random": Policy(random),
    "hrrn": Policy(hrrn, cache_aware=True),
}


def find_policy(name: str) -> Policy:
    """The policy of that name; InvalidRequestError names the ones there are. Imports nothing."""
    if name not in POLICIES:
        raise InvalidRequestError("policy", f"unknown policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]


def load_policy(name: str) -> Policy:
    """A policy by its name, or by ``module:attribute`` from a module of the user's, which is imported.

    For what the operator says at the start, never for what a client says. InvalidRequestError if there is no
    such module, attribute or policy.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        return find_policy(name)
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequestError("policy", f"{name!r} can not be imported: {error}") from error
    if not isinstance(found, Policy):
        raise InvalidRequestError(
            "policy",
            f"{name!r} is a {type(found).__name__}; it must be a trellis.runtime.scheduler.Policy, as Policy(order) makes",
        )
    return found


def order(policy: Policy, queue: QueueView) -> Order:
    """Rows in the order of admission: by priority, then as the policy says. ValueError if the policy does not give
    every row exactly once."""
    n = len(queue)
    falling = -queue.priority  # before the policy can touch it
    rows = np.asarray(policy.order(queue), np.intp)
    place = np.full(n, -1, np.intp)
    if rows.shape == (n,) and (n == 0 or (rows.min() >= 0 and rows.max() < n)):
        place[rows] = np.arange(n)
    if n and place.min() < 0:
        raise ValueError(f"the policy did not order {n} requests: it must give each of 0 .. {n - 1} once")
    return np.lexsort((place, falling))
