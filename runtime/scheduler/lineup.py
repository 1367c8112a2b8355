"""The waiting requests in the order in which one step tries to admit them.

At most ``policy_window`` requests are looked at in a step: those of the highest priority, and of these the oldest.

**Ageing.** Two bounds hold whatever the policy says; both are about the oldest request of the highest priority, and
when its turn has come nobody passes it.

- Once it has waited for ``max_lag_s`` longer than half of those of its priority, it is next. Where arrivals are spread
  this keeps a queue close to the order of arrival. Where all came at once nobody is behind the others, and the
  policy has a free hand to use the cache.
- Once it has waited for ``max_overtake_s``, it is at least every ``AGED_EVERY``-th admission that is the oldest's. So from
  then on the k-th oldest is overtaken by less than k * ``AGED_EVERY`` younger ones. It is not every admission any
  more, since a queue that is longer than that time would then be served in the order of arrival, and the cache be
  of no use just when it is needed most.

What is admitted goes into the tree at once, so others of the same step may now find more of their prompt there.
Where that is worth it the rest is ordered anew: a group of requests with one new prefix is then admitted together,
instead of one of each group, whose prefixes would push each other out of the cache.

Cost: O(window) for the columns of the view, with a look-up in the tree only for requests whose match may have
changed (``KVMemory.cached``); the admissions of a cache-aware policy cost as much again, all together, and once more for
each time that the rest is ordered anew.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from trellis.runtime.scheduler.admission import OutputExpectation
from trellis.runtime.scheduler.config import SchedulerConfig
from trellis.runtime.scheduler.memory import KVMemory
from trellis.runtime.scheduler.policy import Order, Policy, QueueView, order
from trellis.runtime.scheduler.request import CachedAt, Request

logger = logging.getLogger(__name__)

AGED_EVERY = 4  # admissions
REORDER_GAIN = 32  # tokens that a match has to grow by for the queue to be ordered anew within a step


@dataclass
class Turns:
    """passed: admissions since the last turn of the oldest, as long as that one has waited too long. blamed: the last
    policy that was said to fail."""

    passed: int = AGED_EVERY
    blamed: Policy | None = None


class Lineup:
    """Made for one step. ``pop`` requests until None; say which of them were ``admitted`` or are ``served``.

    in_turn: the request that was popped last has the turn of the oldest: nobody may pass it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        memory: KVMemory,
        expectation: OutputExpectation,
        policy: Policy,
        window: list[Request],
        now: float,
        turns: Turns,
    ) -> None:
        self._config = config
        self._memory = memory
        self._expectation = expectation
        self._policy = policy
        self._now = now
        self._turns = turns
        self._by_age = window[::-1]
        self._half = _median_arrival(window)
        self._left = window
        self._tried: set[Request] = set()
        self._gone: set[Request] = set()
        self._alike: dict[Hashable, list[Request]] | None = None
        self.in_turn = False
        self._sort()

    def pop(self) -> Request | None:
        """The next one to try."""
        oldest = self._oldest()
        self.in_turn = oldest is not None and (self._lags(oldest) or self._turns.passed >= AGED_EVERY - 1)
        request = oldest if self.in_turn else self._next()
        if request is None or request in self._tried:
            return None  # in its turn the oldest may have been tried before
        self._tried.add(request)
        return request

    def _next(self) -> Request | None:
        while self._left and self._left[-1] in self._tried:
            self._left.pop()
        return self._left.pop() if self._left else None

    def _oldest(self) -> Request | None:
        """Of the highest priority, if it has waited for too long."""
        while self._by_age and self._by_age[-1] in self._gone:
            self._by_age.pop()
        oldest = self._by_age[-1] if self._by_age else None
        if oldest is not None and self._now - oldest.arrival >= self._config.max_overtake_s:
            return oldest
        self._turns.passed = AGED_EVERY
        return oldest if oldest is not None and self._lags(oldest) else None

    def _lags(self, oldest: Request) -> bool:
        """Has it waited for much longer than half of its equals when the step began, but not for ``max_overtake_s``?"""
        waited, config = self._now - oldest.arrival, self._config
        return self._half - oldest.arrival >= config.max_lag_s and waited < config.max_overtake_s

    def served(self, request: Request) -> None:
        """A running prefill computes what this request waits for, so others do not pass it."""
        self._gone.add(request)

    def first(self, n: int) -> list[Request]:
        """The n that would be popped next if no turn came."""
        return self._left[: -n - 1 : -1]

    def admitted(self, request: Request, found: CachedAt) -> None:
        """The request has put tokens into the tree; found: its match before that. Only those whose match ended
        at the same place, with the same token to come, can have a longer one now."""
        self._turns.passed = 0 if request is self._oldest() else self._turns.passed + 1
        self._gone.add(request)
        if not self._policy.cache_aware or found.length == found.limit:
            return
        if self._alike is None:
            self._alike = {}
            self._file(self._left)
        others = [r for r in self._alike.pop(_next_to_find(request, found), ()) if r not in self._tried]
        gains = [self._memory.cached(other) - found.length for other in others]
        if max(gains, default=0) < REORDER_GAIN:
            self._file(others)
            return
        self._left = [request for request in self._left if request not in self._tried]
        self._left.sort(key=lambda other: (-other.priority, other.order))
        self._sort()

    def _file(self, requests: Sequence[Request]) -> None:
        """By what would make their match longer."""
        assert self._alike is not None
        for request in requests:
            seen = request.cached_at
            if seen.length < seen.limit:
                self._alike.setdefault(_next_to_find(request, seen), []).append(request)

    def _sort(self) -> None:
        """The next one to try goes to the end, where ``pop`` takes it."""
        self._left = [self._left[row] for row in self._order(self._view())[::-1]]
        self._alike = None

    def _order(self, view: QueueView) -> Order:
        try:
            return order(self._policy, view)
        except Exception:
            if self._turns.blamed is not self._policy:  # once, not in every step
                self._turns.blamed = self._policy
                logger.exception("the schedule policy failed; requests are admitted in the order of arrival")
            return np.arange(len(view))

    def _view(self) -> QueueView:
        window = self._left
        policy, memory, expectation = self._policy, self._memory, self._expectation
        cached = [memory.cached(r) for r in window] if policy.cache_aware else [0] * len(window)
        return QueueView(
            number=np.array([r.order for r in window], np.int64),
            waited_s=self._now - np.array([r.arrival for r in window], np.float64),
            prompt_tokens=np.array([len(r.tokens) for r in window], np.int64),
            cached_tokens=np.array(cached, np.int64),
            path=_paths(window) if policy.reads_path else [()] * len(window),
            max_new_tokens=np.array([r.max_new_tokens for r in window], np.int64),
            expected_tokens=np.array(
                [expectation.expect(r.max_new_tokens, r.n_output) for r in window], np.int64
            ),
            priority=np.array([r.priority for r in window], np.int64),
            seed=self._config.policy_seed,
        )


def _median_arrival(window: Sequence[Request]) -> float:
    """Of the requests that have the highest priority; of two in the middle the later one. window: by priority and age."""
    equals = bisect_right(window, -window[0].priority, key=lambda request: -request.priority)
    return window[equals // 2].arrival


def _next_to_find(request: Request, at: CachedAt) -> Hashable:
    """Where the match ends, and the token that would make it longer."""
    return at.node, at.length, request.tokens.at(at.length)


def _paths(window: list[Request]) -> list[list[int]]:
    """The cached nodes of every request, from the root down, numbered as they are first seen."""
    numbers: dict[object, int] = {}
    paths = []
    for request in window:
        node = request.cached_at.node
        nodes = list(node.ancestry())[-2::-1] if node is not None else []
        paths.append([numbers.setdefault(each, len(numbers)) for each in nodes])
    return paths
