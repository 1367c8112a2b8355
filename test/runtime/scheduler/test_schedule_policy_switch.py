"""The policy is switched while requests run and wait, and priorities hold under every policy."""

from __future__ import annotations

import itertools
import random

import pytest
from scheduler_fakes import Harness, assert_as_alone, command

from trellis.runtime.scheduler import POLICIES

WARM = [1 + i % 26 for i in range(40)]


def busy(policy: str) -> tuple[Harness, list]:
    """One request runs for some steps; four wait, the oldest cold, the others with ever longer matches and outputs."""
    harness = Harness(pool=400, max_running_requests=1, policy=policy)
    harness.run(command("warm", WARM, max_new_tokens=0))
    requests = [command("runs", [26] * 5, max_new_tokens=6, ignore_eos=True)]
    for n, prompt in enumerate([[25] * 20, [*WARM[:20], 9], [*WARM[:30], 9], [*WARM, 9]]):
        requests.append(command(f"w{n}", prompt, max_new_tokens=2 + n, ignore_eos=True))
    harness.scheduler.add(requests[:1])
    harness.step()
    harness.scheduler.add(requests[1:])
    return harness, requests


def admissions(harness: Harness) -> list[str]:
    """Who is admitted from now on, in order; until nothing is left to do."""
    order: list[str] = []
    while harness.scheduler.has_work():
        waited = [request.rid for request in harness.scheduler.roster.waiting]
        harness.step()
        left = {request.rid for request in harness.scheduler.roster.waiting}
        order += [rid for rid in waited if rid not in left]
    return order


@pytest.mark.parametrize(("one", "two"), itertools.permutations(sorted(POLICIES), 2))
def test_a_switch_orders_the_next_admission_and_loses_nothing(one, two):
    """What runs goes on, and those that wait are then admitted as if it had been the other policy from the start."""
    harness, requests = busy(one)
    for _ in range(2):
        harness.step()
    running = list(harness.scheduler.roster.running)
    harness.scheduler.set_policy(two)
    assert harness.scheduler.roster.running == running
    assert len(harness.scheduler.roster.waiting) == 4
    reference, _ = busy(two)
    assert admissions(harness) == admissions(reference)
    for request in requests:
        assert_as_alone(harness, request)
    assert harness.scheduler.stats()["policy"] == two


def test_a_switch_between_two_admissions_changes_the_rest_of_the_order():
    """lpm takes the longest match; from then on fcfs takes the oldest."""
    harness, _ = busy("lpm")
    while any(request.rid == "w3" for request in harness.scheduler.roster.waiting):
        harness.step()
    harness.scheduler.set_policy("fcfs")
    assert admissions(harness) == ["w0", "w1", "w2"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_higher_priority_is_admitted_first_whatever_the_policy_prefers(policy):
    """Also where it arrives last, and has a shorter match, a longer prompt and a shorter output than all others."""
    harness, _ = busy(policy)
    harness.scheduler.add(
        [
            command("high", [24] * 60, max_new_tokens=1, priority=1),
            command("low", [*WARM, 9], max_new_tokens=9, priority=-1),
        ]
    )
    order = admissions(harness)
    assert order[0] == "high"
    assert order[-1] == "low"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_priorities_rise_and_fall_with_arrivals_under_every_policy(policy):
    """No request is ever admitted while one of a higher priority waits, if all of them fit."""
    rng = random.Random(7)
    harness = Harness(pool=2000, max_running_requests=3, policy=policy)
    for n in range(40):
        prompt = [*WARM[: rng.randint(0, 40)], rng.randint(1, 26)]
        harness.scheduler.add(
            [command(f"r{n}", prompt, max_new_tokens=rng.randint(1, 6), priority=rng.randint(0, 3))]
        )
        before = {request.rid: request.priority for request in harness.scheduler.roster.waiting}
        harness.step()
        harness.clock.now += rng.random()
        left = {request.rid for request in harness.scheduler.roster.waiting}
        admitted = [priority for rid, priority in before.items() if rid not in left]
        assert not admitted or not left or min(admitted) >= max(before[rid] for rid in left)
    harness.run()
    assert len(harness.outputs) == 40
