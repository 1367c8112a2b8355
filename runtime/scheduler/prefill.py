"""How the prompt tokens of a step are spent: prefills that go on, and waiting requests that are admitted.

1. The oldest unfinished prefill, if it can finish in this step; else half of the budget is kept for it.
2. Other prefills that can finish, the shortest first.
3. Waiting requests in the order of the policy.
4. The other prefills, the shortest first; then the oldest one, with what was kept for it and all that is left.

So short prompts do not wait for a long one, and the long one does not wait for them: it gets half of every step,
and each prefill becomes the oldest one in the end. No budget is left while there is something to compute.

**Who may be passed.** A request that can not be admitted yet (memory, logits rows, or a long prompt while a
shorter one is being prefilled) is passed by those behind it only if the policy is not ``strict`` and the request
has not waited for ``max_overtake_s``. One whose prefix is being computed by a running prefill is not passed: it is
served by that prefill, and is the first of its kind when the prefix is there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trellis.runtime.scheduler.admission import OutputExpectation
from trellis.runtime.scheduler.config import SchedulerConfig
from trellis.runtime.scheduler.lineup import Lineup, Turns
from trellis.runtime.scheduler.memory import KVMemory
from trellis.runtime.scheduler.plan import NOTHING, StepPlan
from trellis.runtime.scheduler.policy import Policy
from trellis.runtime.scheduler.request import Request
from trellis.runtime.scheduler.room import Room
from trellis.runtime.scheduler.roster import Roster

MOST_PASSED = 8  # requests without room that one step tries in vain; each costs an estimate of the peak
MOST_TOUCHED = 64
RETRY_STEPS = 8  # nothing fitted and nobody came or went: so many steps later the estimate may have sunk


@dataclass
class Budget:
    """What is left of a step for prefill: tokens to compute, and logits rows to read for input logprobs."""

    tokens: int
    rows: int


class Prefill:
    """Spends the budget of a step on the prefilling and the waiting requests of the roster."""

    def __init__(
        self, config: SchedulerConfig, roster: Roster, memory: KVMemory, expectation: OutputExpectation
    ) -> None:
        self._config = config
        self._roster = roster
        self._memory = memory
        self._expectation = expectation
        self._turns = Turns()
        self._full_at = -1
        self._patience = 0

    def fill(self, plan: StepPlan, budget: Budget, policy: Policy | None, now: float) -> None:
        """Extend and admit; without a policy nobody is admitted."""
        unfinished = list(self._roster.prefilling)
        for request in unfinished:
            self._memory.attach(request)
        oldest = unfinished[0] if unfinished else None
        unfinished.sort(key=_left)
        kept = 0
        if oldest is not None and _left(oldest) > budget.tokens:
            kept = (budget.tokens + 1) // 2
        elif oldest is not None:
            unfinished.remove(oldest)
            self._extend(plan, oldest, budget)
        budget.tokens -= kept
        later = [r for r in unfinished if _left(r) > budget.tokens or not self._extend(plan, r, budget)]
        if policy is not None:
            self._admit(plan, budget, policy, now, min(map(_left, later), default=None))
        if oldest in later:
            later.remove(oldest)
            later.append(oldest)
        for request in later:
            budget.tokens += kept if request is oldest else 0
            self._extend(plan, request, budget)

    def _extend(self, plan: StepPlan, request: Request, budget: Budget) -> bool:
        """Compute as much of the request's prompt as budget and memory allow. False: nothing."""
        start, room = request.computed, min(budget.tokens, self._memory.room(request))
        end = min(request.target, start + room)
        if request.scored_len < request.score_end:
            end = min(end, request.scored_len - 1 + budget.rows)
        if end <= start:
            return False
        draft = request.draft if end == len(request.tokens) else NOTHING
        if len(draft) > room - (end - start):
            draft = NOTHING
        if not self._memory.reserve(request, end - start + len(draft)):
            return False
        budget.rows -= plan.add(request, end, draft).n_scored
        budget.tokens -= end - start + len(draft)
        published = self._memory.publish(request, end)
        if published is not None:
            plan.published.append(published)
        return True

    # ---- waiting requests ----------------------------------------------------------------------------

    def _admit(
        self, plan: StepPlan, budget: Budget, policy: Policy, now: float, shortest: int | None
    ) -> None:
        """shortest: what the shortest unfinished prefill has left."""
        roster, memory = self._roster, self._memory
        if not roster.waiting or not self._has_place(budget) or self._is_full():
            return
        window = roster.waiting[: self._config.policy_window]
        lineup = Lineup(self._config, memory, self._expectation, policy, window, now, self._turns)
        self._touch(lineup.first(MOST_TOUCHED))
        leaders = [request for request in roster.prefilling if self._leads(request)]
        room: Room | None = None
        in_vain = followers = admitted = 0
        while in_vain < MOST_PASSED and (request := lineup.pop()) is not None:
            if not self._has_place(budget):
                return
            if any(self._follows(request, leader) for leader in leaders):
                followers += 1
                lineup.served(request)
                continue
            left = request.target - memory.cached(request)
            is_long = left > budget.tokens and shortest is not None and left >= shortest
            if not is_long and not self._lacks_rows(request, budget):
                room = room or self._room()
                found = request.cached_at
                if self._try(plan, request, budget, room, now, lineup.in_turn):
                    admitted += 1
                    lineup.admitted(request, found)
                    if self._leads(request):
                        leaders.append(request)
                        shortest = _left_after(request)
                    continue
                in_vain += 1
                room.block(found.node)
            if policy.strict or lineup.in_turn:
                break
        if in_vain and not followers and not admitted:
            self._full_at, self._patience = roster.changes, RETRY_STEPS

    def _try(
        self, plan: StepPlan, request: Request, budget: Budget, room: Room, now: float, in_turn: bool
    ) -> bool:
        """Admit the request if it fits; else everything is as before."""
        roster, memory = self._roster, self._memory
        alone = not roster.running
        goes_on = memory.recent.goes_on(request.cached_at.node)
        roster.run(request)
        memory.attach(request)
        room.add(request)
        if (alone or room.fits(now, in_turn, goes_on)) and self._extend(plan, request, budget):
            room.published(request)
            return True
        room.undo()
        memory.drop(request)
        roster.wait(request)
        return False

    def _touch(self, next_ones: list[Request]) -> None:
        """What the next ones find in the cache becomes the most recently used, that of the first one last, so
        that what nobody waits for is evicted before it."""
        memory = self._memory
        used = self._config.chunked_prefill_size + (1 + memory.page_size) * len(self._roster.running)
        if memory.pool.free >= used:
            return
        for request in reversed(next_ones):
            node = request.cached_at.node
            if node is not None and node.attached and not node.locks:
                self._memory.cache.lock(node)
                self._memory.cache.unlock(node)

    def _room(self) -> Room:
        turns = self._config.room_for_turns
        return Room(self._memory, self._expectation, turns, self._roster.running)

    def _is_full(self) -> bool:
        """Nothing fitted a few steps ago, and nobody has come or gone since."""
        if self._full_at != self._roster.changes or self._patience == 0:
            return False
        self._patience -= 1
        return True

    def _has_place(self, budget: Budget) -> bool:
        running = len(self._roster.running)
        return (
            running < self._config.max_running_requests and budget.tokens > 0 and self._memory.available > 0
        )

    def _lacks_rows(self, request: Request, budget: Budget) -> bool:
        """It wants input logprobs, and this step can read no more of them."""
        return budget.rows <= 0 and request.scored_len < request.score_end

    def _leads(self, request: Request) -> bool:
        """Has this prefill more to compute than is planned so far, and is all that is planned in the tree? Only
        such prefills are waited for; they wait for nobody themselves, so there is no cycle."""
        planned = len(request.slots)
        page = self._memory.page_size
        unfinished = planned < min(request.admitted_len, request.target)
        return unfinished and request.tree_len >= planned // page * page

    def _follows(self, request: Request, leader: Request) -> bool:
        """Is the leader about to compute tokens that this request wants too? Then the request waits for it:
        token by token as they get into the tree, and no longer than the prefill is running.

        One token tells most requests apart. Of the others those that found all that the leader has in the tree are
        known to be alike up to there; only the rest is compared.
        """
        planned, limit = len(leader.slots), min(leader.target, request.match_limit)
        if planned >= limit or request.namespace != leader.namespace:
            return False
        if leader.tokens.at(planned) != request.tokens.at(planned):
            return False
        page = self._memory.page_size
        known = self._memory.cached(request)
        wanted = (max(planned, known) // page + 1) * page
        if wanted > limit:
            return False
        found = request.cached_at
        same = known if found.node is leader.node and not found.inside else 0
        return same_tokens(leader, request, same, wanted)


def _left(request: Request) -> int:
    """Prompt tokens that have no slot yet."""
    return request.target - request.computed


def _left_after(request: Request) -> int:
    """Prompt tokens that have no slot when the step is planned."""
    return request.target - len(request.slots)


def same_tokens(one: Request, other: Request, start: int, end: int) -> bool:
    """Are the tokens [start, end) of both equal?"""
    return np.array_equal(one.tokens.view(start, end), other.tokens.view(start, end))
