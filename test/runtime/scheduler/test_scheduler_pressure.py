"""Tiny pools, aborts, failures: everything ends, every slot is accounted for, every output is exact."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_fakes import Harness, assert_as_alone, choices, command, ids

from trellis.runtime.scheduler import POLICIES


def random_command(rng: random.Random, name: str, pool: int, families: list[list[int]]):
    """A request that shares a prefix with others, of a size that fits the pool."""
    prompt = rng.choice(families)[: rng.randint(1, 40)]
    prompt = [*prompt, *[rng.randint(1, 26) for _ in range(rng.randint(0, 6))]][: pool - 2] or [1]
    kind = rng.random()
    constraint = None
    if kind < 0.25:
        tails = ["".join(rng.choice("abc") for _ in range(rng.randint(1, 7))) for _ in range(3)]
        constraint = choices(*[rng.choice("xyz") + "qq" + tail for tail in tails])
    return command(
        name,
        prompt,
        max_new_tokens=rng.choice([0, 1, 2, 5, 10, 25]),
        constraint=constraint,
        ignore_eos=rng.random() < 0.5,
        min_new_tokens=rng.choice([0, 0, 3]),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randint(0, 99),
        stop=rng.choice([[], [], ["ab", "q"], ["xyz"]]),
        return_logprob=rng.random() < 0.3,
        logprob_start=rng.choice([-1, -1, -1, 0, 3]),
        namespace=rng.choice(["", "", "other"]),
        priority=rng.choice([0, 0, 1]),
        jump_forward=rng.random() < 0.8,
    )


def random_config(rng: random.Random, pool: int) -> dict:
    return {
        "pool": pool,
        "chunked_prefill_size": rng.choice([1, 4, 16, 256]),
        "max_running_requests": rng.choice([1, 3, 16]),
        "max_score_rows": rng.choice([1, 5, 64]),
        "policy": rng.choice(sorted(POLICIES)),
        "policy_window": rng.choice([1, 3, 512]),
        "keep_ended_s": rng.choice([0.0, 3.0]),
        "max_overtake_s": rng.choice([0.0, 3.0, 100.0]),
        "page_size": rng.choice([1, 1, 1, 4]),
        "output_share_start": rng.choice([0.02, 0.7, 1.0]),
        "output_share_floor": 0.01,
        "output_share_steps": 20,
        "overlap": rng.random() < 0.5,
    }


def stress(seed: int, pool: int, count: int, *, fail: bool = False, aborts: bool = True) -> Harness:
    """Random arrivals, aborts and failures; returns the harness when everything has ended."""
    rng = random.Random(seed)
    harness = Harness(**random_config(rng, pool), slow_grammars=rng.random() < 0.5)
    families = [[rng.randint(1, 26) for _ in range(40)] for _ in range(3)]
    requests = [random_command(rng, f"r{i}", harness.size, families) for i in range(count)]
    if fail:
        harness.runner.fail_forward = {n for n in range(1, 400) if rng.random() < 0.05}
        harness.runner.fail_sample = {n for n in range(1, 400) if rng.random() < 0.05}
    todo, aborted = list(requests), set()
    for _ in range(20_000):
        if todo and rng.random() < 0.4:
            group = [todo.pop() for _ in range(min(len(todo), rng.randint(1, 6)))]
            harness.scheduler.add(group)
        if aborts and rng.random() < 0.08:
            name = f"r{rng.randrange(count)}"
            aborted.add(name)
            harness.scheduler.abort(name)
            harness.scheduler.check()
        if rng.random() < 0.03:
            harness.scheduler.flush_cache()
        if rng.random() < 0.3:
            harness.compiler.release()
        harness.clock.now += 1
        harness.step()
        if not todo and not harness.scheduler.roster.by_id:
            break
    assert not todo
    assert not harness.scheduler.roster.by_id, "requests are left"
    for request in requests:
        finish = harness.answer(request.rid).finish
        assert finish is not None
        if finish.type in ("stop", "length"):
            assert_as_alone(harness, request)
        else:
            assert (finish.type == "abort" and request.rid in aborted) or (finish.type == "error" and fail), (
                finish
            )
        counts = harness.answer(request.rid).counts
        assert counts.cached_tokens <= counts.prompt_tokens
        assert counts.completion_tokens == counts.sampled_tokens + counts.forced_tokens
    assert harness.free + harness.cached == harness.size
    harness.scheduler.flush_cache()
    assert harness.free == harness.size
    assert harness.scheduler.counters.drifts == 0
    return harness


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), pool=st.sampled_from([30, 45, 60, 90, 200]), fail=st.booleans())
def test_random_load_on_a_tiny_pool(seed, pool, fail):
    stress(seed, pool, 14, fail=fail)


def test_two_hundred_requests_with_aborts_leave_no_slot_behind():
    harness = stress(3, 120, 200)
    stats = harness.scheduler.stats()
    assert stats["finished"] == 200
    assert stats["aborted"] > 0


@pytest.mark.parametrize("count", [120, pytest.param(500, marks=pytest.mark.slow)])
def test_many_requests_on_a_pool_hardly_larger_than_the_largest(count):
    harness = stress(5, 48, count)
    assert harness.scheduler.counters.finished == count


LARGEST = 100


def uneven_work(count: int) -> list:
    """Requests from 4 to 100 tokens, most of them small; half a prompt may be common to a family."""
    rng = random.Random(1)
    families = [[rng.randint(1, 26) for _ in range(LARGEST)] for _ in range(6)]
    requests = []
    for i in range(count):
        size = LARGEST if i == count // 2 else min(LARGEST, max(4, int(rng.paretovariate(1.2) * 8)))
        prompt = max(1, int(size * rng.uniform(0.2, 0.8)))
        own = rng.randint(0, prompt)
        tokens = [*rng.choice(families)[: prompt - own], *[rng.randint(1, 26) for _ in range(own)]]
        requests.append(command(f"r{i}", tokens, max_new_tokens=size - prompt, ignore_eos=rng.random() < 0.6))
    return requests


@pytest.mark.parametrize("count", [250, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("keep_ended_s", [0.0, 0.5])
def test_a_pool_hardly_larger_than_the_largest_request_does_its_work_well(keep_ended_s, count):
    """Random aborts. At least half as fast as with an ample pool: in tokens computed, as hardly any is computed twice;
    and in steps, of which a pool of this size can not do with fewer than the slots times steps of all requests ÷ size."""
    requests, computed = uneven_work(count), {}
    for pool in (LARGEST * 105 // 100, 12_000):
        rng = random.Random(7)
        harness = Harness(
            pool=pool, chunked_prefill_size=64, max_running_requests=64, keep_ended_s=keep_ended_s
        )
        harness.scheduler.check = lambda: None  # too slow for every step; the tests above do it
        harness.scheduler.add(requests)
        while harness.scheduler.has_work():
            harness.step()
            harness.clock.now += 0.01
            if rng.random() < 0.03:
                harness.scheduler.abort(f"r{rng.randrange(count)}")
        answers = [harness.answer(request.rid) for request in requests]
        assert {answer.finish.type for answer in answers} <= {"stop", "length", "abort"}
        type(harness.scheduler).check(harness.scheduler)
        assert harness.free + harness.cached == pool
        computed[pool] = harness.runner.computed
        held = sum(
            len(request.token_ids) + n
            for request, answer in zip(requests, answers, strict=True)
            for n in range(len(answer.token_ids))
        )
        assert len(harness.runner.batches) <= 2 * max(held / pool, 200)
        assert harness.scheduler.counters.retractions <= 50
    tiny, ample = computed.values()
    assert tiny <= 2 * ample


def test_retraction_keeps_outputs_exact_and_counts_nothing_twice():
    harness = Harness(pool=60, policy="fcfs", output_share_start=0.01, output_share_floor=0.01)
    requests = [
        command(
            f"r{i}", [1 + i, *ids("abcdefg")], max_new_tokens=40, ignore_eos=True, return_logprob=i % 2 == 0
        )
        for i in range(5)
    ]
    answers = harness.run(*requests)
    assert harness.scheduler.counters.retractions > 0
    for request in requests:
        assert_as_alone(harness, request)
        counts = answers[request.rid].counts
        assert counts.cached_tokens == 0
        assert counts.sampled_tokens == 40
        if request.return_logprob:
            assert len(answers[request.rid].logprobs) == 40
    stats = harness.scheduler.stats()
    assert stats["computed_prompt_tokens"] == stats["prompt_tokens"] == 5 * 8
    assert stats["retractions"] == sum(answer.counts.retractions for answer in answers.values())


def test_what_a_retracted_request_computed_is_left_in_the_tree():
    harness = Harness(pool=60, policy="fcfs", output_share_start=0.01, output_share_floor=0.01)
    requests = [
        command(f"r{i}", [1 + i, *ids("abcdefg")], max_new_tokens=40, ignore_eos=True) for i in range(3)
    ]
    harness.run(*requests)
    counters = harness.scheduler.counters
    assert counters.retractions > 0
    assert counters.recomputed_tokens < counters.retractions * 20


def test_a_step_that_retracts_admits_nobody():
    """Not even a small request of high priority that arrives at that moment."""
    harness = Harness(pool=60, policy="fcfs", output_share_start=0.01, output_share_floor=0.01)
    scheduler = harness.scheduler
    scheduler.add(
        [command(f"r{i}", [1 + i, *ids("abcdefg")], max_new_tokens=40, ignore_eos=True) for i in range(5)]
    )
    harness.step()
    while scheduler.memory.available >= len(scheduler.roster.running):
        harness.step()
    scheduler.add([command("small", [20], max_new_tokens=2, ignore_eos=True, priority=1)])
    running = set(scheduler.roster.running)
    harness.step()
    assert scheduler.counters.retractions > 0
    assert set(scheduler.roster.running) < running
    harness.run()
    assert len(harness.answer("small").token_ids) == 2


def test_the_last_running_request_is_never_retracted():
    harness = Harness(pool=30)
    request = command("r", "abcdef", max_new_tokens=24, ignore_eos=True)
    answer = harness.run(request)["r"]
    assert len(answer.token_ids) == 24
    assert answer.counts.retractions == 0


def test_full_expectation_never_retracts():
    rng = random.Random(0)
    harness = Harness(pool=100, output_share_start=1.0, output_share_floor=1.0)
    requests = [
        command(
            f"r{i}",
            [rng.randint(1, 26) for _ in range(rng.randint(1, 20))],
            max_new_tokens=rng.randint(1, 40),
            ignore_eos=True,
        )
        for i in range(60)
    ]
    harness.run(*requests)
    assert harness.scheduler.counters.retractions == 0
    for request in requests:
        assert_as_alone(harness, request)


# ---- aborts ----------------------------------------------------------------------------------------------


def test_abort_frees_the_slots_at_once_and_is_idempotent():
    harness = Harness(pool=50)
    harness.scheduler.add([command("r", "abcdef", max_new_tokens=40, ignore_eos=True)])
    for _ in range(5):
        harness.step()
    harness.scheduler.abort("r")
    assert harness.scheduler.memory.available == 50
    harness.scheduler.abort("r")
    harness.scheduler.abort("never seen")
    harness.run()
    assert harness.answer("r").finish.type == "abort"
    assert harness.scheduler.counters.aborted == 1


def test_abort_while_waiting_and_while_compiling():
    harness = Harness(max_running_requests=1, slow_grammars=True)
    harness.scheduler.add(
        [
            command("run", "abc", max_new_tokens=5, ignore_eos=True),
            command("wait", "abd"),
            command("compile", "abe", constraint=choices("x")),
        ]
    )
    harness.step()
    harness.scheduler.abort("wait")
    harness.scheduler.abort("compile")
    harness.run()
    harness.compiler.release()
    assert not harness.scheduler.has_work()
    assert [harness.answer(rid).finish.type for rid in ("run", "wait", "compile")] == [
        "length",
        "abort",
        "abort",
    ]


def test_a_grammar_is_cancelled_when_its_request_ends_and_only_then():
    harness = Harness(slow_grammars=True)
    harness.scheduler.add([command(rid, "abe", constraint=choices("xy")) for rid in ("leaves", "stays")])
    (_, left), (_, stayed) = harness.compiler.pending
    harness.scheduler.abort("leaves")
    assert left.cancelled()
    harness.compiler.release()
    harness.run()
    assert not stayed.cancelled()
    assert harness.answer("leaves").finish.type == "abort"
    assert harness.answer("stays").text == "xy"


def test_followers_of_an_aborted_prefill_go_on():
    harness = Harness(pool=400, chunked_prefill_size=10)
    prefix = [1 + i % 26 for i in range(60)]
    followers = [command(f"f{i}", [*prefix, 1 + i], max_new_tokens=2) for i in range(3)]
    harness.scheduler.add([command("leader", [*prefix, 26], max_new_tokens=2), *followers])
    harness.step()
    harness.step()
    assert len(harness.scheduler.roster.waiting) == 3
    harness.scheduler.abort("leader")
    harness.run()
    for request in followers:
        assert_as_alone(harness, request)
    # the twenty tokens that the leader had computed were of use
    assert harness.answer("f0").counts.cached_tokens == 20


# ---- failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["fail_forward", "fail_sample"])
def test_a_failed_step_ends_only_its_batch_and_takes_back_what_it_inserted(where):
    harness = Harness(pool=200, max_running_requests=3)
    before = command("before", "abcdef", max_new_tokens=2)
    harness.run(before)
    cached = harness.cached
    setattr(harness.runner, where, {harness.runner.forwards + 1, harness.runner.samples + 1})
    batch = [command(f"r{i}", ids("abcdefghij") + [1 + i] * 5) for i in range(3)]
    later = command("later", "abcdefghijklm")
    answers = harness.run(*batch, later)
    for request in batch:
        finish = answers[request.rid].finish
        assert (finish.type, finish.status) == ("error", 500)
        assert "Boom" in finish.message
    assert_as_alone(harness, later)
    # only what was cached before the failure was found
    assert answers["later"].counts.cached_tokens == 6 <= cached
    assert harness.scheduler.counters.failed_steps == 1


def test_followers_of_a_failed_prefill_go_on():
    harness = Harness(pool=400, chunked_prefill_size=10)
    prefix = [1 + i % 26 for i in range(60)]
    followers = [command(f"f{i}", [*prefix, 1 + i], max_new_tokens=2) for i in range(3)]
    harness.runner.fail_forward = {3}
    answers = harness.run(command("leader", [*prefix, 26], max_new_tokens=2), *followers)
    assert answers["leader"].finish.type == "error"
    for request in followers:
        assert_as_alone(harness, request)


def test_a_failure_of_planning_ends_requests_but_not_the_scheduler(monkeypatch):
    harness = Harness()
    harness.scheduler.add([command("r", "abc")])
    monkeypatch.setattr(harness.scheduler._planner._prefill, "_admit", lambda *_: 1 // 0)
    harness.run()
    assert harness.answer("r").finish.type == "error"
    monkeypatch.undo()
    harness.run(command("s", "abc"))
    assert_as_alone(harness, command("s", "abc"))


def test_a_drift_is_counted_and_healed_when_idle(caplog):
    harness = Harness(pool=50)
    harness.run(command("a", "abcdef"))
    assert harness.scheduler.memory.pool.alloc(3) is not None  # three slots that nobody owns
    with pytest.raises(RuntimeError, match="lost"):
        harness.scheduler.check()
    harness.scheduler.step()
    assert harness.scheduler.counters.drifts == 1
    assert "slot books" in caplog.text
    harness.scheduler.check()
    assert harness.free + harness.cached == 50
    harness.run(command("b", "abcdef"))
    assert harness.answer("b").token_ids == harness.answer("a").token_ids


def test_flush_frees_all_but_what_is_in_use():
    harness = Harness(pool=100)
    harness.run(command("old", "zzzzzz", max_new_tokens=1))
    harness.scheduler.add([command("r", "abcdef", max_new_tokens=10, ignore_eos=True)])
    harness.step()
    assert harness.scheduler.flush_cache() == {"freed_tokens": 6, "running_requests": 1}
    harness.run()
    assert_as_alone(harness, command("r", "abcdef", max_new_tokens=10, ignore_eos=True))
    harness.scheduler.flush_cache()
    assert harness.free == 100


def step_without_check(harness: Harness) -> None:
    while harness.scheduler.has_work():
        for output in harness.scheduler.step():
            harness.outputs.setdefault(output.rid, []).append(output)


def test_prefills_that_find_no_slot_give_way_to_each_other():
    """Slots that nobody owns (a defect) are taken from the pool, so that what admission promised is not there."""
    harness = Harness(pool=60, chunked_prefill_size=8)
    requests = [command(f"r{i}", [1 + i] * 25, max_new_tokens=2, ignore_eos=True) for i in range(2)]
    harness.scheduler.add(requests)
    for _ in range(4):
        harness.step()
    assert len(harness.scheduler.roster.running) == 2
    stolen = harness.scheduler.memory.pool.alloc(harness.free)
    assert stolen is not None
    step_without_check(harness)
    assert harness.scheduler.counters.retractions > 0
    for request in requests:
        assert_as_alone(harness, request)


def test_a_prefill_that_never_finds_a_slot_ends_with_an_error():
    harness = Harness(pool=60, chunked_prefill_size=8)
    harness.scheduler.add([command("r", [1] * 25)])
    harness.step()
    assert harness.scheduler.memory.pool.alloc(harness.free) is not None
    step_without_check(harness)
    finish = harness.answer("r").finish
    assert (finish.type, finish.status) == ("error", 503)
    harness.run(command("s", [1] * 25))
    assert_as_alone(harness, command("s", [1] * 25))


@pytest.mark.parametrize(
    ("token", "logprob", "says"),
    [(9999, -1.0, "9999"), (-1, -1.0, "no finite best"), (3, None, "no logprob")],
)
def test_a_senseless_answer_of_the_sampler_ends_that_request(token, logprob, says):
    harness = Harness()
    sample = harness.runner.sample

    def wrong(logits, rows):
        sampled = sample(logits, rows)
        return type(sampled)([token, *sampled.token_ids[1:]], [logprob, *sampled.logprobs[1:]], sampled.top)

    harness.scheduler.add(
        [command("bad", "abc", return_logprob=True), command("good", "abd", max_new_tokens=3)]
    )
    harness.runner.sample = wrong
    harness.step()
    harness.runner.sample = sample
    harness.run()
    finish = harness.answer("bad").finish
    assert (finish.type, finish.status) == ("error", 500)
    assert says in finish.message
    assert_as_alone(harness, command("good", "abd", max_new_tokens=3))


def test_a_mask_that_allows_nothing_ends_that_request():
    harness = Harness()
    good = command("good", "abc")
    answers = harness.run(command("bad", "abc", constraint=choices()), good)
    assert answers["bad"].finish.type == "error"
    assert "allows no token" in answers["bad"].finish.message
    assert_as_alone(harness, good)


def test_a_compiler_that_crashes_fails_its_request():
    harness = Harness(slow_grammars=True)
    harness.scheduler.add([command("bad", "abc", constraint=choices("x")), command("good", "abc")])
    harness.compiler.pending.pop()[1].set_exception(MemoryError("in the compiler"))
    harness.run()
    finish = harness.answer("bad").finish
    assert (finish.type, finish.status) == ("error", 500)
    assert "in the compiler" in finish.message
    assert_as_alone(harness, command("good", "abc"))


def test_check_finds_each_kind_of_fault():
    harness = Harness(pool=50)
    harness.run(command("a", "zzz", max_new_tokens=1))
    harness.scheduler.add([command("r", "abcdef", max_new_tokens=10, ignore_eos=True)])
    harness.step()
    harness.step()
    request = harness.scheduler.roster.by_id["r"]
    memory = harness.scheduler.memory

    mine = request.slots.view(6, 7).copy()
    request.slots.write(6, request.slots.view(0, 1))
    with pytest.raises(RuntimeError, match="more than one owner"):
        harness.scheduler.check()
    request.slots.write(6, mine)

    first = request.slots.view(0, 1).copy()
    request.slots.write(0, memory.cache.match(ids("zzz")).slots[:1])
    with pytest.raises(RuntimeError, match="not use the slots of its own path"):
        harness.scheduler.check()
    request.slots.write(0, first)

    memory.cache.lock(request.node)
    with pytest.raises(RuntimeError, match="held 2 times, by 1"):
        harness.scheduler.check()
    memory.cache.unlock(request.node)
    harness.scheduler.check()
