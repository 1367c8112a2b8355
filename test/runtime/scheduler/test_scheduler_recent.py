"""Programs come back with what they said before: what admission keeps for them, and when it does not."""

from __future__ import annotations

import random

import pytest
from scheduler_fakes import Harness, command

from trellis.runtime.scheduler.recent import MOST, Recent


def chats(harness: Harness, count: int, turns: int, step_s: float = 0.01, **kwargs) -> int:
    """So many conversations at once, each next turn a step after the answer; returns the prompt tokens computed."""
    rng = random.Random(5)
    history = {f"c{k}": [rng.randint(1, 26) for _ in range(30)] for k in range(count)}
    turn = dict.fromkeys(history, 0)
    for name, tokens in history.items():
        harness.scheduler.add([command(f"{name}.0", list(tokens), ignore_eos=True, **kwargs)])
    for _ in range(20_000):
        if not harness.scheduler.has_work():
            break
        ended = [output.rid for output in harness.step() if output.finish is not None]
        harness.clock.now += step_s
        for rid in ended:
            name = rid.split(".")[0]
            turn[name] += 1
            history[name] += [*harness.answer(rid).token_ids, *[rng.randint(1, 26) for _ in range(5)]]
            if turn[name] < turns:
                harness.scheduler.add(
                    [command(f"{name}.{turn[name]}", list(history[name]), ignore_eos=True, **kwargs)]
                )
    assert set(turn.values()) == {turns}
    return harness.scheduler.counters.computed_prompt_tokens


def test_conversations_that_do_not_all_fit_are_held_one_after_another():
    """Six conversations grow to 80 tokens each in a pool of 200. At best every token is computed once."""
    once = 6 * (30 + 4 * (1 + 5))  # the last token of an answer has no slot yet
    kept = chats(Harness(pool=200, keep_ended_s=0.5), 6, 5, max_new_tokens=6)
    evicted = chats(Harness(pool=200, keep_ended_s=0.0), 6, 5, max_new_tokens=6)
    assert kept <= 1.1 * once
    assert evicted > 1.25 * once


def test_requests_that_nobody_goes_on_with_are_soon_not_held():
    harness = Harness(pool=200, keep_ended_s=0.5)
    rng = random.Random(2)
    requests = [
        command(f"r{i}", [rng.randint(1, 26) for _ in range(20)], max_new_tokens=4, ignore_eos=True)
        for i in range(120)
    ]
    harness.scheduler.add(requests)
    steps = 0
    while harness.scheduler.has_work():
        harness.step()
        harness.clock.now += 0.05
        steps += 1
    assert not harness.scheduler.memory.recent.worth_it
    reference = Harness(pool=200, keep_ended_s=0.0)
    reference.run(*requests)
    assert steps <= len(reference.runner.batches) + 60


@pytest.mark.parametrize("keep_s", [0.0, 1.0])
def test_what_has_ended_is_held_for_its_time_and_four_steps(keep_s):
    harness = Harness(pool=100, keep_ended_s=keep_s)
    harness.run(command("r", [1, 2, 3, 4, 5], max_new_tokens=3, ignore_eos=True))
    recent = harness.scheduler.memory.recent
    assert recent.held(0.9, []) == (7 if keep_s else 0)
    for _ in range(4):
        recent.step()
    assert recent.held(0.9, []) == (7 if keep_s else 0)
    assert recent.held(1.0, []) == 0


def test_a_node_is_counted_once_and_only_while_nobody_holds_it():
    harness = Harness(pool=100, keep_ended_s=1.0)
    memory = harness.scheduler.memory
    harness.run(command("r", [1, 2, 3, 4, 5], max_new_tokens=1, ignore_eos=True))
    node = memory.cache.match([1, 2]).node
    assert memory.recent.held(0.0, [node, node]) == 5
    memory.cache.lock(node)
    assert memory.recent.held(0.0, [node]) == 3
    memory.cache.unlock(node)


def test_only_what_goes_on_with_an_ended_sequence_goes_on():
    """Not what shares a template with it, however long that is, nor what goes on with nothing."""
    harness = Harness(pool=400, keep_ended_s=1.0)
    template = [1 + i % 26 for i in range(50)]
    for own in (3, 4, 5):
        harness.run(command(f"r{own}", [*template, *[own] * 10], max_new_tokens=3, ignore_eos=True))
    memory = harness.scheduler.memory
    for own in (4, 5):
        ended = harness.scheduler.memory.cache.match(
            [*template, *[own] * 10, *harness.answer(f"r{own}").token_ids]
        )
        assert memory.recent.goes_on(ended.node)
    assert not memory.recent.goes_on(memory.cache.match([*template, 9]).node)
    assert not memory.recent.goes_on(None)


def test_programs_that_share_a_long_template_are_begun_one_after_another():
    """Twelve conversations behind a template of 60 tokens grow by 44 each in a pool of 240: hardly a token is computed
    twice though most of each first prompt is in the cache."""
    rng = random.Random(3)
    template = [rng.randint(1, 26) for _ in range(60)]
    once = len(template) + 12 * (8 + 4 * (1 + 8))
    harness = Harness(pool=240, keep_ended_s=0.5)
    history = {f"c{k}": [*template, *[rng.randint(1, 26) for _ in range(8)]] for k in range(12)}
    turn = dict.fromkeys(history, 0)
    harness.scheduler.add(
        [command(f"{name}.0", list(h), max_new_tokens=4, ignore_eos=True) for name, h in history.items()]
    )
    while harness.scheduler.has_work():
        ended = [output.rid for output in harness.step() if output.finish is not None]
        harness.clock.now += 0.01
        for rid in ended:
            name = rid.split(".")[0]
            turn[name] += 1
            history[name] += [*harness.answer(rid).token_ids, *[rng.randint(1, 26) for _ in range(8)]]
            if turn[name] < 5:
                again = command(
                    f"{name}.{turn[name]}", list(history[name]), max_new_tokens=4, ignore_eos=True
                )
                harness.scheduler.add([again])
    assert set(turn.values()) == {5}
    assert harness.scheduler.counters.computed_prompt_tokens <= 1.15 * once


def test_the_memory_of_ends_is_bounded():
    harness = Harness(pool=100)
    node = harness.scheduler.memory.cache.insert([1], harness.scheduler.memory.pool.alloc(1)).node
    recent = Recent(1.0)
    for _ in range(3 * MOST):
        recent.add(node, 0.0)
    assert len(recent._ended) == MOST
