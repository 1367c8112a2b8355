"""Random operations on the real scheduler with a fake model and a tiny pool; the books are verified after each.

What must hold in the end: every request has ended exactly once, what was answered is what the request gives
when it is served alone, and after a flush every slot is free.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scheduler_fakes import Boom, FakeCompiler, Harness, assert_as_alone, choices, command

from trellis.radix import POLICIES as EVICTION_POLICIES
from trellis.runtime.messages import Constraint, GenerateCommand
from trellis.runtime.scheduler.policy import POLICIES

FAMILIES = 3
LONGEST = 64

texts = st.lists(st.text("abx", min_size=1, max_size=6), min_size=1, max_size=3, unique=True)
kinds = st.sampled_from(["choices", "choices", "choices", "broken", "lying", "strict", "fragile"])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.sampled_from(
            [(1, 30), (1, 50), (1, 90), (4, 30), (4, 62), (4, 100), (16, 64), (16, 100), (16, 160)]
        ),
        chunk=st.sampled_from([1, 5, 16, 33, 256]),
        running=st.sampled_from([1, 3, 16]),
        rows=st.sampled_from([1, 7, 64]),
        share=st.sampled_from([0.02, 0.7, 1.0]),
        policy=st.sampled_from(sorted(POLICIES)),
        eviction=st.sampled_from(sorted(EVICTION_POLICIES)),
        seed=st.integers(0, 2**16),
        overlap=st.booleans(),
    )
    def start(
        self,
        pages: tuple[int, int],
        chunk: int,
        running: int,
        rows: int,
        share: float,
        policy: str,
        eviction: str,
        seed: int,
        overlap: bool,
    ) -> None:
        page, slots = pages
        self.pool = slots - slots % page
        rng = random.Random(seed)
        self.families = [[rng.randint(1, 26) for _ in range(LONGEST)] for _ in range(FAMILIES)]
        self.compiler = FakeCompiler(slow=True)
        self.harness = Harness(
            pool=slots,
            rng=random.Random(seed),
            compiler=self.compiler,
            page_size=page,
            chunked_prefill_size=chunk,
            max_running_requests=running,
            max_queued_requests=40,
            max_score_rows=rows,
            output_share_start=share,
            output_share_floor=0.01,
            output_share_steps=20,
            max_overtake_s=3.0,
            policy=policy,
            eviction_policy=eviction,
            overlap=overlap,
        )
        self.scheduler = self.harness.scheduler
        self.requests: dict[str, GenerateCommand] = {}
        self.may_fail: set[str] = set()

    # ---- requests ------------------------------------------------------------------------------------

    def send(self, prompt: list[int], max_new_tokens: int, **more: Any) -> str:
        name = f"r{len(self.requests)}"
        self.requests[name] = command(name, prompt, max_new_tokens, seed=len(name), **more)
        self.scheduler.add([self.requests[name]])
        return name

    def prompt(self, family: int, shared: int, own: list[int]) -> list[int]:
        """A prefix of a family that fits the pool with a token to spare, and a tail of its own."""
        return [*self.families[family][: min(shared, self.pool - 8)], *own]

    prompts = st.tuples(
        st.integers(0, FAMILIES - 1), st.integers(1, LONGEST), st.lists(st.integers(1, 26), max_size=5)
    )
    namespaces = st.sampled_from(["", "", "one", "two"])

    @rule(
        shape=prompts,
        n=st.sampled_from([0, 1, 2, 6, 30]),
        namespace=namespaces,
        temperature=st.sampled_from([0.0, 1.0]),
        ignore_eos=st.booleans(),
        priority=st.sampled_from([0, 0, 1]),
    )
    def add(self, shape: tuple[int, int, list[int]], n: int, namespace: str, **more: Any) -> None:
        self.send(self.prompt(*shape), n, namespace=namespace, **more)

    @rule(shape=prompts, many=st.integers(2, 5), n=st.sampled_from([1, 4]))
    def add_several_with_one_prefix(self, shape: tuple[int, int, list[int]], many: int, n: int) -> None:
        for own in range(many):
            self.send([*self.prompt(*shape)[: self.pool - 8], 1 + own], n, ignore_eos=True)

    @rule(shape=prompts, many=st.integers(2, 6))
    def add_long_answers(self, shape: tuple[int, int, list[int]], many: int) -> None:
        """More than the pool holds together, so that some must give way."""
        for own in range(many):
            self.send([1 + own, *self.prompt(*shape)[: self.pool // 3]], self.pool // 2, ignore_eos=True)

    @rule(
        shape=prompts,
        start=st.integers(0, 8),
        n=st.sampled_from([0, 0, 3]),
        logprob=st.booleans(),
        top=st.integers(0, 2),
    )
    def add_score(
        self, shape: tuple[int, int, list[int]], start: int, n: int, logprob: bool, top: int
    ) -> None:
        prompt = self.prompt(*shape)
        start = min(start, len(prompt) - 1)
        self.send(prompt, n, logprob_start=start, return_logprob=logprob, top_logprobs_num=top)

    @rule(
        shape=prompts,
        texts=texts,
        kind=kinds,
        namespace=namespaces,
        jump=st.booleans(),
        logprob=st.booleans(),
    )
    def add_constrained(
        self,
        shape: tuple[int, int, list[int]],
        texts: list[str],
        kind: str,
        namespace: str,
        jump: bool,
        logprob: bool,
    ) -> None:
        name = self.send(
            self.prompt(*shape),
            8,
            constraint=choices(*texts, kind=kind),
            namespace=namespace,
            jump_forward=jump,
            return_logprob=logprob,
        )
        if kind != "choices":
            self.may_fail.add(name)

    @rule(shape=prompts)
    def add_with_a_grammar_that_does_not_compile(self, shape: tuple[int, int, list[int]]) -> None:
        name = self.send(self.prompt(*shape), 8, constraint=Constraint("choices", "[not json"))
        self.may_fail.add(name)

    @rule(extra=st.integers(0, 9))
    def add_too_long(self, extra: int) -> None:
        self.may_fail.add(self.send([3] * (self.pool + extra), 4))

    @rule()
    def release_grammars(self) -> None:
        self.compiler.release()

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 10_000))
    def abort(self, index: int) -> None:
        name = f"r{index % len(self.requests)}"
        self.may_fail.add(name)
        self.scheduler.abort(name)

    # ---- the step, and what can go wrong in it -------------------------------------------------------

    @rule(n=st.integers(1, 20), seconds=st.sampled_from([0.0, 1.0, 5.0]))
    def step(self, n: int, seconds: float) -> None:
        for _ in range(n):
            self.harness.clock.now += seconds
            self.harness.step()

    def step_that_may_fail(self) -> None:
        before = self.scheduler.counters.failed_steps
        live = set(self.scheduler.roster.by_id)
        self.harness.step()
        self.land()
        if self.scheduler.counters.failed_steps > before:
            self.may_fail |= live

    def land(self) -> None:
        """No step is being computed afterwards: its results are entered, and the next call of the runner is that of the
        next step."""
        self.scheduler._land()

    @rule()
    def step_with_a_failing_forward(self) -> None:
        runner = self.harness.runner
        self.land()
        runner.fail_forward = {runner.forwards + 1}
        self.step_that_may_fail()
        runner.fail_forward = set()

    @rule()
    def step_with_failing_sampling(self) -> None:
        runner = self.harness.runner
        self.land()
        runner.fail_sample = {runner.samples + 1}
        self.step_that_may_fail()
        runner.fail_sample = set()

    @rule(name=st.sampled_from(["publish", "reserve_each", "attach"]), call=st.integers(0, 3))
    def step_whose_planning_fails_half_way(self, name: str, call: int) -> None:
        memory = self.scheduler.memory
        setattr(memory, name, failing_at(call, getattr(memory, name)))
        self.step_that_may_fail()
        delattr(memory, name)

    # ---- control -------------------------------------------------------------------------------------

    @rule()
    def flush(self) -> None:
        self.scheduler.flush_cache()

    @rule(name=st.sampled_from(sorted(POLICIES)))
    def set_policy(self, name: str) -> None:
        self.scheduler.set_policy(name)

    # ---- what must hold ------------------------------------------------------------------------------

    @invariant()
    def every_slot_has_one_owner_and_every_lock_a_holder(self) -> None:
        scheduler = self.scheduler
        scheduler.check()
        private = sum(scheduler.memory.private(request) for request in scheduler.roster.running)
        assert self.harness.free + self.harness.cached + private == self.pool
        assert scheduler.counters.drifts == 0

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5_000):
            self.compiler.release()
            if not self.scheduler.has_work():
                break
            self.harness.clock.now += 1
            self.harness.step()
        assert not self.scheduler.roster.by_id, "requests are left"
        assert self.harness.outputs.keys() == self.requests.keys()
        for name, request in self.requests.items():
            ends = [output.finish for output in self.harness.outputs[name] if output.finish is not None]
            assert len(ends) == 1
            if ends[0].type in ("stop", "length"):
                assert_as_alone(self.harness, request)
            else:
                assert name in self.may_fail or ends[0].status == 503, ends[0]
        self.scheduler.flush_cache()
        assert self.harness.free == self.pool


def failing_at(call: int, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, but its call number ``call`` (from 0) raises before it does anything."""
    calls = 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call + 1:
            raise Boom(f"{method.__name__} failed")
        return method(*args)

    return failing


def settings_for(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_random_operations_leave_the_books_exact() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=settings_for(12, 30))


@pytest.mark.slow
def test_many_random_operations_leave_the_books_exact() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=settings_for(500, 40))
