"""The scheduler: a plain synchronous object that serves many requests with one batch a step.

It does no I/O, never sleeps and owns all its state; messages, processes and clocks are at the edge. One
thread calls it. ``step`` is: drain compiled grammars, plan, forward (and fill masks meanwhile), sample, commit.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trellis.errors import CapacityError, ConstraintError, InvalidRequestError, TrellisError
from trellis.fsm.contract import ConstraintSpec, Vocabulary
from trellis.runtime.executor.contract import Runner, launches
from trellis.runtime.messages import Constraint, FinishReason, GenerateCommand, TokenOutput
from trellis.runtime.scheduler import healing
from trellis.runtime.scheduler.admission import OutputExpectation
from trellis.runtime.scheduler.advance import begin
from trellis.runtime.scheduler.cache_view import CacheView
from trellis.runtime.scheduler.commit import commit, fail
from trellis.runtime.scheduler.compute import compute
from trellis.runtime.scheduler.conclude import conclude
from trellis.runtime.scheduler.config import SchedulerConfig
from trellis.runtime.scheduler.counters import Counters
from trellis.runtime.scheduler.draft import propose
from trellis.runtime.scheduler.emit import emit, is_due, refuse
from trellis.runtime.scheduler.flight import Flight
from trellis.runtime.scheduler.intake import output_limit
from trellis.runtime.scheduler.memory import KVMemory
from trellis.runtime.scheduler.plan import PlannedExtend, StepPlan
from trellis.runtime.scheduler.planner import Planner
from trellis.runtime.scheduler.policy import find_policy, load_policy
from trellis.runtime.scheduler.request import Request
from trellis.runtime.scheduler.roster import Compiler, Roster
from trellis.runtime.scheduler.stats import collect

logger = logging.getLogger(__name__)


class Scheduler:
    """Serves requests: ``add`` them, call ``step`` while ``has_work``, pass on what it returns.

    config: limits and policies. runner: the model. vocabulary: the tokenizer as constraints see it.
    grammars: compiles constraints in its own threads; a request waits for that outside the queue.
    clock: seconds, monotonic; used for the ageing of waiting requests. rng: gives seeds to requests without
    one. on_grammar_ready: called (from a compiler thread) when a step has become worthwhile.

    Every request that is added ends with exactly one ``TokenOutput`` that has ``finish`` set, whatever
    happens to it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        vocabulary: Vocabulary,
        grammars: Compiler,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        on_grammar_ready: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.counters = Counters()
        self._runner = runner
        self._vocabulary = vocabulary
        self._grammars = grammars
        self._clock = clock
        self._rng = rng or random.Random()
        self._on_grammar_ready = on_grammar_ready
        self._aside = ThreadPoolExecutor(1, "trellis-masks")  # one, as no two threads may use a matcher
        # One, so that steps are computed one after the other.
        self._device = ThreadPoolExecutor(1, "trellis-device") if config.overlap else None
        self._flight: Flight | None = None
        self._order = 0
        self._outbox: list[TokenOutput] = []
        self.policy_name = config.policy
        self._policy = self._first_policy = load_policy(config.policy)
        self.roster = Roster()
        self.memory = KVMemory(
            config.capacity, config.page_size, config.eviction_policy, clock, config.keep_ended_s
        )
        self._cache_view = CacheView(clock)
        self.expectation = OutputExpectation(
            config.output_share_start, config.output_share_floor, config.output_share_steps
        )
        self._planner = Planner(config, self.roster, self.memory, self.expectation)

    # ---- requests come and go ------------------------------------------------------------------------

    def add(self, commands: list[GenerateCommand]) -> None:
        """Take new requests. One that can not be taken is answered by the next step: finish ``abort`` with
        status 400 (it never can) or 503 (not now). Never raises on account of a request."""
        for command in commands:
            try:
                self._add(command)
            except Exception as error:
                self._refuse(command, error)

    def abort(self, rid: str) -> None:
        """End the request with exactly this id, at whatever stage it is; its slots are free at once. Unknown
        ids are ignored."""
        request = self.roster.by_id.get(rid)
        if request is not None:
            self.counters.aborted += 1
            self._finish(request, FinishReason("abort", message="the request was aborted"))

    def has_work(self) -> bool:
        """False: nothing to do until a message comes or a grammar is ready."""
        roster = self.roster
        busy = self._outbox or self._flight or roster.running or roster.waiting
        return bool(busy or roster.compiled())

    # ---- the step ------------------------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        """One batch. Returns what is new; never raises on account of a request, a grammar or the runner."""
        self._drain_grammars()
        if self._flight is not None and not (self.roster.running and self._flight.lets_plan_ahead()):
            self._land()
        if self.roster.running or self.roster.waiting:
            self.counters.steps += 1
            self._compute_batch()
        if not self.roster.running:
            self._idle()
        outputs, self._outbox = self._outbox, []
        return outputs

    def _compute_batch(self) -> None:
        plan = self._plan()
        if plan is None or not plan.extends:
            self._land()
        elif self._device is None:
            self._compute(plan)
        else:
            before, flight = self._flight, self._launch(plan, self._device)
            self._flight = flight
            if before is not None:
                self._enter(before)

    def _plan(self) -> StepPlan | None:
        plan = StepPlan()
        try:
            self._planner.fill(plan, self._policy, self._clock(), ahead=self._flight is not None)
        except Exception as error:
            suspects = list(self.roster.running) or self.roster.waiting[:1]
            self._fail_step(plan, suspects, "planning failed", error)
            return None
        self.counters.retractions += len(plan.retracted)
        for request in plan.unfit:
            self._finish(request, _out_of_slots(request))
        return plan

    def _compute(self, plan: StepPlan) -> None:
        try:
            extends = [extend.to_extend() for extend in plan.extends]
            compute(plan, extends, self._runner, self._vocabulary, self._aside)
            commit(plan.extends, self._vocabulary, self.counters)
        except Exception as error:
            self._fail_step(plan, [e.request for e in plan.extends], "the forward pass failed", error)
        else:
            self._conclude(plan.extends)

    def _conclude(self, extends: list[PlannedExtend]) -> None:
        """Pass on what a step gave."""
        self.counters.forward_passes += 1
        self.expectation.step()
        for extend in extends:
            request = extend.request
            if extend.draft:
                self.memory.trim(request)
            if request.closing is not None or is_due(request):
                self._hand_out(request)

    # ---- steps that run while the next one is planned ---------------------------------------------------

    def _launch(self, plan: StepPlan, device: ThreadPoolExecutor) -> Flight:
        flight = Flight(plan, self._flight, self._runner, self._vocabulary, device, self._aside)
        flight.take_off()
        return flight

    def _land(self) -> None:
        """Wait for the step that is being computed, if there is one, and enter its results."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._enter(flight)

    def _enter(self, flight: Flight) -> None:
        extends: list[PlannedExtend] = []
        try:
            flight.wait()
            extends = [extend for extend in flight.plan.extends if extend.request.stage == "running"]
            for extend in extends:
                if extend.request.in_flight is extend:
                    extend.request.in_flight = None
            commit(extends, self._vocabulary, self.counters)
        except Exception as error:
            failing = [e.request for e in flight.plan.extends if e.request.stage == "running"]
            self._abandon_next(failing)
            self._fail_step(flight.plan, failing, "the forward pass failed", error)
        else:
            self._conclude(extends)

    def _abandon_next(self, failing: list[Request]) -> None:
        """The step after one that failed was not computed: what it planned is taken back. Its requests go back to
        the queue, but for those that fail with the step before."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        with contextlib.suppress(Exception):
            flight.wait()
        for request in [extend.request for extend in flight.plan.extends]:
            request.ground()
            if request.stage == "running":
                self.memory.drop(request)
                if request not in failing:
                    self.roster.wait(request)
        self.memory.take_back(flight.plan.published)

    def _hand_out(self, request: Request) -> None:
        ended = request.closing is not None and (request.closing.type == "error" or request.settled)
        if ended:
            self._finish(request, request.closing)
            return
        output = emit(request)
        if output is not None:
            self._outbox.append(output)

    def _fail_step(self, plan: StepPlan, requests: list[Request], what: str, error: Exception) -> None:
        """The requests of the batch end with an error; what the step put into the tree is taken back."""
        logger.error("%s; %d requests end with an error", what, len(requests), exc_info=error)
        self.counters.failed_steps += 1
        for request in requests:
            request.ground()
            self.memory.drop(request)
        self.memory.take_back(plan.published)
        for request in requests:
            fail(request, TrellisError(f"{what}: {type(error).__name__}: {error}"))
            self._finish(request, request.closing)

    def _finish(self, request: Request, finish: FinishReason | None) -> None:
        finish, grammar = conclude(request, finish, self._vocabulary, self.counters)
        output = emit(request, finish, grammar)
        request.ground()
        self.memory.store(request)
        self.roster.end(request)
        if finish is not None and finish.type == "error":
            self.counters.errors += 1
        self.counters.finished += 1
        if output is not None:
            self._outbox.append(output)

    # ---- grammars ------------------------------------------------------------------------------------

    def _drain_grammars(self) -> None:
        for request, future in self.roster.compiled():
            try:
                request.grammar = future.result()
                request.matcher = request.grammar.matcher()
                healing.start(request, self._vocabulary)
                begin(request, self._vocabulary)
                request.draft = propose(request)
            except Exception as error:
                self._reject_grammar(request, error)
            else:
                self.counters.forced_tokens += request.forced_tokens
                self.roster.wait(request)

    def _reject_grammar(self, request: Request, error: Exception) -> None:
        if isinstance(error, ConstraintError) and error.code != "internal":
            self._finish(request, FinishReason("abort", message=str(error), status=400, code=error.code))
        else:
            fail(request, error)
            self._finish(request, request.closing)

    # ---- control -------------------------------------------------------------------------------------

    def set_policy(self, name: str) -> None:
        """Order waiting requests by another policy from the next step on: one of ``POLICIES``, or that of the
        start. InvalidRequestError if unknown."""
        self._policy = self._first_policy if name == self.config.policy else find_policy(name)
        self.policy_name = name

    def flush_cache(self) -> dict[str, int]:
        """Forget every cached token that no running request uses."""
        freed = self.memory.flush()
        return {"freed_tokens": freed, "running_requests": len(self.roster.running)}

    def cache_snapshot(self, limit: int, edge_tokens: int, namespace: str | None = None) -> dict[str, Any]:
        """The tree as people may see it; see ``CacheView.show``."""
        return self._cache_view.show(self.memory.cache, limit, edge_tokens, namespace)

    def stats(self) -> dict[str, Any]:
        """Totals and sizes, for people and metrics."""
        return collect(self, self._grammars)

    def runner_stats(self) -> dict[str, Any]:
        """Of a runner that launches; see ``LaunchingRunner.stats``. Of others nothing."""
        return self._runner.stats() if launches(self._runner) else {}

    def check(self) -> None:
        """Verify every invariant of the slot books, O(pool); raises RuntimeError with what is wrong."""
        self.memory.check(self.roster.running)

    # ---- private -------------------------------------------------------------------------------------

    def _add(self, command: GenerateCommand) -> None:
        if command.rid in self.roster.by_id:
            raise InvalidRequestError("rid", f"a request with the id {command.rid!r} is already running")
        limit = output_limit(command, self.config, self._vocabulary.size)
        if self.roster.queued >= self.config.max_queued_requests:
            raise CapacityError(
                f"the queue is full: {self.roster.queued} requests wait (max_queued_requests); try again later"
            )
        seed = command.params.seed if command.params.seed is not None else self._rng.getrandbits(63)
        request = Request.from_command(command, limit, seed, self._clock(), self._order)
        if command.constraint is None:
            healing.start(request, self._vocabulary)
            request.draft = propose(request)
            self.roster.wait(request)
        else:
            self._compile(request, command.constraint)
        self._order += 1
        self.counters.requests += 1
        self.counters.prompt_tokens += len(command.token_ids)

    def _compile(self, request: Request, constraint: Constraint) -> None:
        spec = ConstraintSpec(
            constraint.kind,  # type: ignore[arg-type]  # an unknown kind is refused by the compiler
            constraint.source,
            constraint.spacing,  # type: ignore[arg-type]
            constraint.strict,
        )
        future = self._grammars.submit(spec)
        self.roster.compile(request, future)
        if self._on_grammar_ready is not None:
            wake = self._on_grammar_ready

            def ready(_: object) -> None:
                wake()

            future.add_done_callback(ready)

    def _refuse(self, command: GenerateCommand, error: Exception) -> None:
        self.counters.refused += 1
        if isinstance(error, CapacityError):
            status = error.status
        elif isinstance(error, InvalidRequestError):
            status = 400
        else:
            status = 500
            logger.error("request %s could not be taken", command.rid, exc_info=error)
        self._outbox.append(refuse(command, str(error), status))

    def _idle(self) -> None:
        """Nothing is running, so every slot must be free or in the tree, unlocked. If the books say otherwise
        that is a defect; it is logged and counted, and the books start anew, as the cache is only a cache."""
        self.expectation.idle()
        drift = self.memory.drift([])
        if drift or self.memory.cache.protected:
            self.counters.drifts += 1
            logger.error(
                "slot books are wrong by %d, %d tokens locked though nothing runs; starting them anew",
                drift,
                self.memory.cache.protected,
            )
            self.memory.heal()


def _out_of_slots(request: Request) -> FinishReason:
    """The end of a request that has the pool for itself and still finds no slot."""
    message = "the KV pool is full"
    if request.computed < request.prompt_len:
        return FinishReason("error", message=f"{message}; try again later", status=503)
    return FinishReason("length", message=message)
