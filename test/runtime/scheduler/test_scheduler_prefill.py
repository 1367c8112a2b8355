"""How a step's budget is spent: bounds on what others can take from a request, and what planning costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_fakes import Harness, assert_as_alone, choices, command

from trellis.runtime.scheduler import prefill
from trellis.runtime.scheduler.planner import even_cap

RNG = random.Random(0)
LONG = [RNG.randint(1, 26) for _ in range(2000)]


def short(name: str, number: int, length: int = 20, **kwargs):
    """A prompt that shares nothing with ``LONG`` nor with the others."""
    rng = random.Random(1000 + number)
    return command(name, [rng.randint(1, 26) for _ in range(length)], **{"max_new_tokens": 1, **kwargs})


# ---- the bound on a step ---------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6), chunk=st.sampled_from([2, 7, 16, 64]), share=st.sampled_from([0.25, 0.5, 1.0])
)
def test_a_step_computes_at_most_its_budget_beside_one_token_of_each(seed, chunk, share):
    """Prompts, forced runs, retractions: R running requests and a budget of B make at most R + B tokens."""
    rng = random.Random(seed)
    harness = Harness(pool=300, chunked_prefill_size=chunk, prefill_min_share=share)
    texts = ["".join(rng.choice("ab") + "q" * rng.randint(3, 30) for _ in range(2)) for _ in range(6)]
    todo = [
        short(f"r{i}", seed + i, rng.randint(1, 80), max_new_tokens=40, constraint=choices(*texts))
        if rng.random() < 0.5
        else short(f"r{i}", seed + i, rng.randint(1, 80), max_new_tokens=rng.randint(1, 20))
        for i in range(14)
    ]
    while todo or harness.scheduler.has_work():
        if todo and rng.random() < 0.5:
            harness.scheduler.add([todo.pop()])
        before = len(harness.runner.batches)
        harness.step()
        for batch in harness.runner.batches[before:]:
            assert sum(n for n, _ in batch) <= len(batch) + chunk


def test_every_running_request_gets_on_in_every_step():
    harness = Harness(pool=4000, chunked_prefill_size=16)
    harness.scheduler.add([short(f"r{i}", i, 2, max_new_tokens=100, ignore_eos=True) for i in range(8)])
    harness.step()
    harness.scheduler.add([command("long", LONG[:800], max_new_tokens=1)])
    texts = [letter + "z" * 70 for letter in "abc"]
    harness.scheduler.add(
        [short(f"f{i}", 50 + i, 2, max_new_tokens=90, constraint=choices(*texts)) for i in range(4)]
    )
    for _ in range(60):
        decoding = {r.rid: r.computed for r in harness.scheduler.roster.running if not r.prefilling}
        harness.step()
        for rid, computed in decoding.items():
            request = harness.scheduler.roster.by_id.get(rid)
            assert request is None or request.computed > computed


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(0, 200))
def test_even_cap_is_the_largest_that_fits(wanted, total):
    def needed(cap: int) -> int:
        return sum(min(n, cap) for n in wanted)

    cap = even_cap(wanted, total)
    assert needed(cap) <= total
    assert needed(cap) == sum(wanted) or needed(cap + 1) > total


# ---- prompts beside each other ---------------------------------------------------------------------------


def test_short_prompts_do_not_wait_for_a_long_one_and_it_gets_half_of_every_step():
    harness = Harness(pool=4000, chunked_prefill_size=50)
    harness.scheduler.add([command("long", LONG[:1000], max_new_tokens=1)])
    harness.step()
    long = harness.scheduler.roster.by_id["long"]
    for number in range(12):
        computed = long.computed
        harness.scheduler.add([short(f"s{number}", number)])
        harness.step()
        assert f"s{number}" in harness.outputs
        assert long.computed - computed in (30, 31)  # a first token may be the same
    for number in range(20, 28):
        computed = long.computed
        harness.scheduler.add([short(f"s{number}.{k}", 10 * number + k) for k in range(4)])
        harness.step()
        assert long.computed - computed >= 25
    harness.run()
    assert harness.answer("long").finish is not None


def test_a_long_prompt_that_has_begun_ends_whatever_comes():
    """Each prefill is the oldest in the end, and the oldest gets half: 2 x 500 tokens by steps of 50 at the latest."""
    harness = Harness(pool=6000, chunked_prefill_size=50)
    harness.scheduler.add([command("long", LONG[:500], max_new_tokens=1)])
    harness.step()
    steps = 0
    while "long" not in harness.outputs:
        harness.scheduler.add([short(f"s{steps}.{k}", 100 * steps + k, 40) for k in range(3)])
        harness.step()
        steps += 1
    assert steps <= 2 * 500 / 50


def test_a_shorter_prompt_begins_beside_a_long_one_and_a_longer_one_waits():
    harness = Harness(pool=6000, chunked_prefill_size=50, policy="hrrn")
    harness.scheduler.add([command("long", LONG[:700], max_new_tokens=1)])
    harness.step()
    harness.scheduler.add([short("longer", 1, 1500), short("middle", 2, 90)])
    for _ in range(5):
        harness.step()
    assert "middle" in harness.outputs
    assert harness.scheduler.roster.by_id["longer"].stage == "waiting"
    harness.run()
    assert_as_alone(harness, short("longer", 1, 1500))


def test_no_budget_is_left_while_prompts_wait():
    harness = Harness(pool=9000, chunked_prefill_size=64, max_running_requests=64)
    requests = [short(f"r{i}", i, RNG.randint(5, 400)) for i in range(25)]
    harness.run(*requests)
    total = sum(len(request.token_ids) for request in requests)
    sizes = [sum(n for n, _ in batch) for batch in harness.runner.batches]
    assert len(sizes) <= total / 64 + 3


# ---- when the next one does not fit -----------------------------------------------------------------------


def crowded(policy: str, **config) -> Harness:
    """Sixty slots of a hundred are taken for long, and the first in the queue needs seventy-five."""
    harness = Harness(pool=100, policy=policy, output_share_start=1.0, output_share_floor=1.0, **config)
    harness.scheduler.add([short("there", 1, 20, max_new_tokens=40, ignore_eos=True)])
    harness.step()
    harness.scheduler.add([short("big", 2, 45, max_new_tokens=30, ignore_eos=True)])
    return harness


def test_one_that_does_not_fit_is_passed_until_it_has_waited_too_long():
    harness = crowded("lpm", max_overtake_s=5.0, max_lag_s=100.0)
    for second in range(12):
        harness.scheduler.add([short(f"small{second}", 10 + second, 3)])
        harness.step()
        assert (f"small{second}" in harness.outputs) == (second < 5)
        harness.clock.now += 1
    harness.run()
    assert_as_alone(harness, short("big", 2, 45, max_new_tokens=30, ignore_eos=True))


def test_a_strict_policy_lets_nobody_pass():
    harness = crowded("fcfs")
    harness.scheduler.add([short("small", 3, 3)])
    harness.step()
    assert "small" not in harness.outputs
    harness.run()


def test_who_waits_for_a_prefix_in_the_making_holds_up_nobody_in_its_turn():
    harness = Harness(pool=4000, chunked_prefill_size=50, max_overtake_s=0.0)
    harness.scheduler.add([command("leader", LONG[:400], max_new_tokens=1)])
    harness.step()
    harness.scheduler.add([command("follower", [*LONG[:390], 1, 2], max_new_tokens=1), short("other", 1)])
    harness.step()
    assert "other" in harness.outputs
    harness.run()
    assert harness.answer("follower").counts.cached_tokens >= 390


# ---- what planning costs ---------------------------------------------------------------------------------


def count_comparisons(monkeypatch):
    """How many tokens were compared, of each pair of a prefill and a waiting request."""
    compared = []
    real = prefill.same_tokens

    def counting(one, other, start, end):
        compared.append(end - start)
        return real(one, other, start, end)

    monkeypatch.setattr(prefill, "same_tokens", counting)
    return compared


def test_prompts_are_compared_only_where_their_next_token_is_the_same(monkeypatch):
    compared = count_comparisons(monkeypatch)
    harness = Harness(pool=9000, chunked_prefill_size=50, max_running_requests=2)
    harness.scheduler.add([command("leader", LONG, max_new_tokens=1)])
    harness.step()
    token = LONG[50]
    others = [
        [1 + (token + i % 25) % 26] * 60 for i in range(300)
    ]  # differ from the leader at once, and at 50
    harness.scheduler.add([command(f"r{i}", other, max_new_tokens=1) for i, other in enumerate(others)])
    harness.scheduler.add([command("follower", LONG[:300], max_new_tokens=1)])
    harness.step()
    assert 1 <= len(compared) <= 12


def test_waiting_for_a_long_prompt_costs_what_is_new_of_it(monkeypatch):
    compared = count_comparisons(monkeypatch)
    harness = Harness(pool=9000, chunked_prefill_size=50)
    harness.scheduler.add([command("leader", LONG, max_new_tokens=1)])
    harness.step()
    harness.scheduler.add([command(f"r{i}", LONG, max_new_tokens=1) for i in range(20)])
    looked_up = []
    trace = harness.scheduler.memory.cache.trace

    def counting(tokens, namespace="", after=None):
        found = trace(tokens, namespace, after)
        if after is not None:
            looked_up.append(found[0])
        return found

    monkeypatch.setattr(harness.scheduler.memory.cache, "trace", counting)
    for _ in range(5):
        harness.step()
    assert len(looked_up) >= 4 * 20
    assert set(looked_up) == {50}
    assert compared == [1] * (5 * 20)


def test_waiting_requests_are_looked_up_again_only_where_the_tree_has_changed(monkeypatch):
    harness = Harness(pool=4000, max_running_requests=2)
    prefixes = [[1 + k] * 20 for k in range(10)]
    harness.run(*[command(f"warm{k}", prefix, max_new_tokens=0) for k, prefix in enumerate(prefixes)])
    harness.scheduler.add(
        [command(f"run{k}", [20, k + 1] * 5, max_new_tokens=50, ignore_eos=True) for k in range(2)]
    )
    harness.step()
    memory = harness.scheduler.memory
    waiting = [
        command(f"w{i}", [*prefixes[i % 10], 15, 16, 1 + i % 26, 1 + i // 26], max_new_tokens=1)
        for i in range(100)
    ]
    harness.scheduler.add(waiting)
    requests = [harness.scheduler.roster.by_id[each.rid] for each in waiting]
    assert [memory.cached(request) for request in requests] == [20] * 100

    looked_up = []
    trace = memory.cache.trace
    monkeypatch.setattr(memory.cache, "trace", lambda *args: looked_up.append(1) or trace(*args))
    memory.cache.insert([*prefixes[3], 15, 9], memory.pool.alloc(22))  # more of what ten of them want
    memory.version += 1
    found = [memory.cached(request) for request in requests]
    assert found == [21 if i % 10 == 3 else 20 for i in range(100)]
    assert len(looked_up) == 10


def test_a_full_pool_is_not_asked_again_every_step(monkeypatch):
    harness = crowded("lpm")
    tries = []
    real = prefill.Prefill._try
    monkeypatch.setattr(prefill.Prefill, "_try", lambda *args: tries.append(1) or real(*args))
    for _ in range(18):
        harness.step()
    assert len(tries) <= 3
    harness.scheduler.add([short("small", 3, 3)])
    harness.step()
    assert "small" in harness.outputs, "somebody came, so it is asked again"


@pytest.mark.parametrize("queued", [100, 5000])
def test_a_long_queue_costs_a_step_no_more_than_its_window(monkeypatch, queued):
    harness = Harness(pool=4000, max_running_requests=1, policy_window=64, max_queued_requests=10_000)
    looked_up = []
    trace = harness.scheduler.memory.cache.trace
    monkeypatch.setattr(
        harness.scheduler.memory.cache, "trace", lambda *args: looked_up.append(1) or trace(*args)
    )
    harness.scheduler.add(
        [command(f"r{i}", [1 + i % 26, 1 + i // 26 % 26], max_new_tokens=1) for i in range(queued)]
    )
    harness.step()
    assert len(looked_up) <= 2 * 64 + 2
