"""Plans one step: which requests extend by how many tokens, and in which slots.

1. Running requests that have their prompt go on: one token, or a token and its forced run. If slots are short
   some are retracted.
2. Prompts: prefills that go on, and waiting requests that are admitted (see ``prefill.py``), unless the step
   retracted some.

Prompt extents go into the tree as they are planned, so a request shares what an earlier one of the same step
is about to compute.

**The bound on a step.** With R requests running and B = chunked_prefill_size a step computes at most R + B tokens
(R + 2 where B = 1): every running request that has its prompt gets at least one of them, forced runs get at most
what ``prefill_min_share`` leaves of B, evenly, and prefill all of B that they do not take. So this is also the
most that lies between two tokens of a running request, and prefill goes on by ``prefill_min_share`` of B a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trellis.runtime.scheduler.admission import OutputExpectation
from trellis.runtime.scheduler.config import SchedulerConfig
from trellis.runtime.scheduler.memory import KVMemory
from trellis.runtime.scheduler.plan import NOTHING, StepPlan
from trellis.runtime.scheduler.policy import Policy
from trellis.runtime.scheduler.prefill import Budget, Prefill
from trellis.runtime.scheduler.request import Request
from trellis.runtime.scheduler.retract import Victim, choose_victims
from trellis.runtime.scheduler.roster import Roster


class Planner:
    """Reads and moves the requests of the roster, takes slots from the memory, fills a ``StepPlan``."""

    def __init__(
        self, config: SchedulerConfig, roster: Roster, memory: KVMemory, expectation: OutputExpectation
    ) -> None:
        self._config = config
        self._roster = roster
        self._memory = memory
        self._expectation = expectation
        self._prefill = Prefill(config, roster, memory, expectation)
        self._most_forced = max(1, config.chunked_prefill_size - config.prefill_min_tokens)  # tokens a step

    def fill(self, plan: StepPlan, policy: Policy, now: float, ahead: bool = False) -> None:
        """Plan one step. On an exception the plan holds what was planned so far.

        ahead: the step before is being computed (see ``flight.py``). Then no request gives way to another, and none
        ends for want of a slot, as its tokens are not all known: rather the plan stays empty.
        """
        config, prefill = self._config, self._prefill
        self._roster.settle()
        self._memory.recent.step()
        if ahead:
            if not self._follow(plan):
                return
            forced = 0
        else:
            forced = self._go_on(plan)
        if not self._roster.prefilling and not self._roster.waiting:
            return
        budget = Budget(
            max(config.prefill_min_tokens, config.chunked_prefill_size - forced), config.max_score_rows
        )
        prefill.fill(plan, budget, None if plan.retracted else policy, now)
        while not ahead and not plan.extends and self._unblock(plan):
            prefill.fill(plan, budget, None, now)

    # ---- requests that have their prompt ---------------------------------------------------------------

    def _go_on(self, plan: StepPlan) -> int:
        """All of them extend. Returns the tokens of forced runs."""
        decoding = self._roster.decoding
        if not decoding:
            return 0
        memory, wanted = self._memory, self._wanted(decoding)
        while (short := memory.taken_by_each(decoding, wanted) - memory.available) > 0:
            if not self._retract(plan, short):
                break
            decoding = self._roster.decoding
            wanted = self._wanted(decoding)
        drafts = self._drafts(decoding, wanted)
        slots = [n + len(draft) for n, draft in zip(wanted, drafts, strict=True)]
        if not memory.reserve_each(decoding, slots):
            plan.unfit.extend(decoding)
            return 0
        add = plan.add
        for request, n, draft in zip(decoding, wanted, drafts, strict=True):
            add(request, request.computed + n, draft)
        return sum(slots) - len(slots)

    def _follow(self, plan: StepPlan) -> bool:
        """All that do not certainly end with the token to come extend by that token. False: there is no slot for it."""
        going_on = [request for request in self._roster.decoding if _goes_on(request)]
        if not going_on:
            return True
        if not self._memory.reserve_each(going_on, [1] * len(going_on)):
            return False
        for request in going_on:
            plan.add(request, request.computed + 1)
        return True

    def _drafts(self, decoding: list[Request], wanted: list[int]) -> list[Sequence[int]]:
        """What each computes beyond its tokens, where all of these are computed: what forced runs leave of their
        share of a step, and of slots that nobody has to give up."""
        drafts, memory = [request.draft for request in decoding], self._memory
        tokens = self._most_forced + len(wanted) - sum(wanted)
        slots = memory.available - memory.taken_by_each(decoding, wanted)
        for index, draft in enumerate(drafts):
            if not draft:
                continue
            request, n = decoding[index], wanted[index]
            more = memory.taken(request, n + len(draft)) - memory.taken(request, n)
            if len(draft) <= tokens and more <= slots and request.computed + n == len(request.tokens):
                tokens -= len(draft)
                slots -= more
            else:
                drafts[index] = NOTHING
        return drafts

    def _wanted(self, decoding: list[Request]) -> list[int]:
        """How many tokens each extends by."""
        wanted = [
            (len(request.tokens) if request.closing is None else request.target) - request.computed
            for request in decoding
        ]
        if sum(wanted) - len(wanted) <= self._most_forced:
            return wanted
        cap = 1 + even_cap((n - 1 for n in wanted), self._most_forced)
        return [min(n, cap) for n in wanted]

    def _retract(self, plan: StepPlan, short: int) -> bool:
        """Send requests back to the queue so that ``short`` slots, and some for the steps to come, get free.
        Their computed tokens stay in the tree. False if only one request is running: it is never retracted."""
        running = self._roster.running
        if len(running) < 2:
            return False
        headroom = min(self._config.retract_headroom_steps * len(running), self._memory.size // 10)
        demand = dict(zip(self._roster.decoding, self._wanted(self._roster.decoding), strict=True))
        victims = [
            Victim(
                request.priority,
                self._memory.exclusive(request),
                self._memory.taken(request, demand.get(request, 0)),
                request.order,
            )
            for request in running
        ]
        for request in [running[index] for index in choose_victims(victims, short + headroom)]:
            self._memory.store(request, ended=False)
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


def _goes_on(request: Request) -> bool:
    return request.closing is None and request.n_output + 1 < request.max_new_tokens


def even_cap(wanted: Iterable[int], total: int) -> int:
    """The largest cap so that the sum of min(n, cap) over wanted is at most total; 0 if even 1 is too much."""
    rising = sorted(n for n in wanted if n > 0)
    for done, n in enumerate(rising):
        share = total // (len(rising) - done)
        if n > share:
            return share
        total -= n
    return rising[-1] if rising else 0
