"""Plans one step: which requests extend by how many tokens, and in which slots.

1. Running requests go on: one token, or a token and its forced run. If slots are short some are retracted.
2. Unfinished prefills continue, within the token budget.
3. Waiting requests are admitted in the order of the policy, while budget and memory allow.

Prompt extents go into the tree as they are planned, so a request shares what an earlier one of the same step
is about to compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trellis.runtime.scheduler.admission import OutputExpectation
from trellis.runtime.scheduler.buffer import IntArray
from trellis.runtime.scheduler.config import SchedulerConfig
from trellis.runtime.scheduler.memory import KVMemory
from trellis.runtime.scheduler.occupancy import Occupancy
from trellis.runtime.scheduler.plan import StepPlan
from trellis.runtime.scheduler.policy import Policy, QueueView, order
from trellis.runtime.scheduler.request import Request
from trellis.runtime.scheduler.retract import Victim, choose_victims
from trellis.runtime.scheduler.roster import Roster


@dataclass
class Budget:
    """What is left of a step for prefill: tokens to compute, and logits rows to read for input logprobs."""

    tokens: int
    rows: int


class Planner:
    """Reads and moves the requests of the roster, takes slots from the memory, fills a ``StepPlan``."""

    def __init__(
        self, config: SchedulerConfig, roster: Roster, memory: KVMemory, expectation: OutputExpectation
    ) -> None:
        self._config = config
        self._roster = roster
        self._memory = memory
        self._expectation = expectation

    def fill(self, plan: StepPlan, policy: Policy, now: float) -> None:
        """Plan one step. On an exception the plan holds what was planned so far."""
        config = self._config
        long_runs = self._go_on(plan)
        budget = Budget(
            max(config.prefill_min_tokens, config.chunked_prefill_size - long_runs), config.max_score_rows
        )
        self._continue_prefills(plan, budget)
        while not plan.extends and self._unblock(plan):
            self._continue_prefills(plan, budget)
        if not plan.retracted:
            self._admit(plan, budget, policy, now)

    # ---- running requests ----------------------------------------------------------------------------

    def _go_on(self, plan: StepPlan) -> int:
        """Every running request that has its prompt extends. Returns the tokens of forced runs."""
        wanted = self._make_room(plan)
        if not self._memory.reserve_each(wanted):
            plan.unfit.extend(request for request, _ in wanted)
            return 0
        for request, n in wanted:
            plan.add(request, request.computed + n)
        return sum(n - 1 for _, n in wanted)

    def _make_room(self, plan: StepPlan) -> list[tuple[Request, int]]:
        """Retract until what all the others need is available; returns these and how much they need."""
        while True:
            running = self._roster.running
            wanted = [(request, self._demand(request)) for request in running if not request.prefilling]
            short = sum(n for _, n in wanted) - self._memory.available
            if short <= 0 or not self._retract(plan, short):
                return wanted

    def _demand(self, request: Request) -> int:
        return min(request.target - request.computed, self._config.chunked_prefill_size)

    def _retract(self, plan: StepPlan, short: int) -> bool:
        """Send requests back to the queue so that ``short`` slots, and some for the steps to come, get free.
        Their computed tokens stay in the tree. False if only one request is running: it is never retracted."""
        running = self._roster.running
        if len(running) < 2:
            return False
        headroom = min(self._config.retract_headroom_steps * len(running), self._memory.size // 10)
        victims = [
            Victim(
                priority=request.priority,
                cost=self._memory.exclusive(request),
                demand=0 if request.prefilling else self._demand(request),
                order=request.order,
            )
            for request in running
        ]
        for request in [running[index] for index in choose_victims(victims, short + headroom)]:
            self._memory.store(request)
            request.retractions += 1
            self._roster.wait(request)
            plan.retracted.append(request)
        self._expectation.shortage()
        return True

    def _unblock(self, plan: StepPlan) -> bool:
        """Nothing could be planned though requests are running: none has a slot to go on with."""
        running = self._roster.running
        if not running or plan.unfit:
            return False
        if not self._retract(plan, 1):
            plan.unfit.extend(running)
            return False
        return True

    def _continue_prefills(self, plan: StepPlan, budget: Budget) -> None:
        for request in self._roster.running:
            if request.prefilling and budget.tokens > 0:
                self._memory.attach(request)
                self._prefill(plan, request, budget)

    def _prefill(self, plan: StepPlan, request: Request, budget: Budget) -> bool:
        """Extend a request by as much of its prompt as budget and memory allow. False: by nothing."""
        start = request.computed
        end = min(request.target, start + min(budget.tokens, self._memory.available))
        if request.scored_len < request.score_end:
            end = min(end, request.scored_len - 1 + budget.rows)
        if end <= start or not self._memory.reserve(request, end - start):
            return False
        budget.rows -= plan.add(request, end).n_scored
        budget.tokens -= end - start
        published = self._memory.publish(request, end)
        if published is not None:
            plan.published.append(published)
        return True

    # ---- waiting requests ----------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, budget: Budget, policy: Policy, now: float) -> None:
        roster = self._roster
        if not roster.waiting or not self._has_place(budget):
            return
        occupancy = self._occupancy()
        for request in self._in_order(policy, now):
            if not self._has_place(budget):
                return
            if self._lacks_rows(request, budget) or self._follows(request):
                continue
            alone = not roster.running
            roster.run(request)
            self._memory.attach(request)
            occupancy.add(request, self._expected(request))
            fits = alone or occupancy.peak() <= self._memory.size
            if not fits or not self._prefill(plan, request, budget):
                self._memory.drop(request)
                roster.wait(request)
                return
            occupancy.published(request)

    def _has_place(self, budget: Budget) -> bool:
        running = len(self._roster.running)
        return (
            running < self._config.max_running_requests and budget.tokens > 0 and self._memory.available > 0
        )

    def _occupancy(self) -> Occupancy:
        """The running requests, those that go on longest first: then every node is counted only once."""
        occupancy = Occupancy()
        expected = [(self._expected(request), request) for request in self._roster.running]
        for left, request in sorted(expected, key=lambda entry: -entry[0]):
            occupancy.add(request, left)
        return occupancy

    def _expected(self, request: Request) -> int:
        return self._expectation.expect(request.max_new_tokens, request.n_output)

    def _in_order(self, policy: Policy, now: float) -> list[Request]:
        """The waiting requests in the order in which to try them."""
        queue = list(self._roster.waiting)
        window, rest = queue[: self._config.policy_window], queue[self._config.policy_window :]
        cached = [self._memory.cached(r) for r in window] if policy.cache_aware else [0] * len(window)
        view = QueueView(
            waited_s=np.array([now - request.arrival for request in window], np.float64),
            prompt_tokens=np.array([len(request.tokens) for request in window], np.int64),
            cached_tokens=np.array(cached, np.int64),
            max_new_tokens=np.array([request.max_new_tokens for request in window], np.int64),
            priority=np.array([request.priority for request in window], np.int64),
            max_overtake_s=self._config.max_overtake_s,
        )
        return [window[row] for row in order(policy, view)] + rest

    def _lacks_rows(self, request: Request, budget: Budget) -> bool:
        """It wants input logprobs, and this step can read no more of them."""
        return budget.rows <= 0 and request.scored_len < request.score_end

    def _follows(self, request: Request) -> bool:
        """Is a running prefill about to compute tokens that this request wants too?

        Then the request waits for it: token by token as they get into the tree, and no longer than the prefill
        is running. Only prefills whose computed tokens are all in the tree are waited for, and these never
        wait for anything themselves, so there is no cycle.
        """
        reach = -1
        page = self._memory.page_size
        for leader in self._roster.running:
            if leader.namespace != request.namespace or not self._leads(leader):
                continue
            if reach < 0:
                reach = self._memory.cached(request)
            wanted = request.tokens.view(0, request.match_limit)
            shared = common_prefix(leader.tokens.view(0, leader.target), wanted) // page * page
            if shared > max(reach, len(leader.slots)):
                return True
        return False

    def _leads(self, leader: Request) -> bool:
        page = self._memory.page_size
        planned = len(leader.slots)
        return planned < min(leader.admitted_len, leader.target) and leader.tree_len >= planned // page * page


def common_prefix(a: IntArray, b: IntArray) -> int:
    """How many leading tokens are equal."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n
