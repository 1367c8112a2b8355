"""Large pages, end to end: only whole pages are shared, and everything else stays exact."""

from __future__ import annotations

import random

import pytest
from scheduler_fakes import Harness, assert_as_alone, command

PAGES = [1, 16, 64]


def letters(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(1, 26) for _ in range(n)]


@pytest.mark.parametrize("page", PAGES)
def test_a_second_request_finds_the_whole_pages_of_the_first(page: int) -> None:
    harness = Harness(pool=1_000, page_size=page)
    prompt = letters(150)
    harness.run(command("a", prompt, max_new_tokens=1, ignore_eos=True))
    second = command("b", [*prompt, 1, 2, 3], max_new_tokens=5, ignore_eos=True)
    answer = harness.run(second)["b"]
    assert answer.counts.cached_tokens == 150 // page * page
    assert_as_alone(harness, second)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("chunk", [7, 40, 1_000])
def test_requests_that_arrive_together_compute_a_common_prefix_once_up_to_the_page(
    page: int, chunk: int
) -> None:
    """Whether the prefix is computed in one step or in chunks that end inside of pages."""
    harness = Harness(pool=2_000, page_size=page, chunked_prefill_size=chunk)
    prefix = letters(200)
    requests = [command(f"r{i}", [*prefix, 1 + i], max_new_tokens=2, ignore_eos=True) for i in range(6)]
    harness.run(*requests)
    shared = 200 // page * page
    # A follower shares what stands in the tree; the rest of the last page, and its own token, it computes.
    first, rest = 201, 5 * (201 - shared)
    decoded = 6
    assert harness.runner.computed == first + rest + decoded
    for request in requests:
        assert_as_alone(harness, request)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("failing", ["forward", "sample"])
def test_a_failed_step_leaves_only_whole_pages_that_were_computed(page: int, failing: str) -> None:
    harness = Harness(pool=1_000, page_size=page, chunked_prefill_size=50)
    harness.scheduler.add([command(f"r{i}", [*letters(180), 1 + i], max_new_tokens=3) for i in range(3)])
    harness.step()
    harness.step()
    setattr(harness.runner, f"fail_{failing}", set(range(1, 100)))
    while harness.scheduler.has_work():
        harness.step()
    assert harness.cached % page == 0
    assert harness.free + harness.cached == 1_000
    harness.runner.fail_forward = harness.runner.fail_sample = set()
    again = command("again", letters(180), max_new_tokens=4, ignore_eos=True)
    harness.run(again)
    assert_as_alone(harness, again)


@pytest.mark.parametrize("page", PAGES)
def test_under_pressure_everything_ends_and_every_slot_is_there(page: int) -> None:
    harness = Harness(pool=6 * 64, page_size=page, output_share_start=0.02, output_share_floor=0.01)
    requests = [
        command(f"r{i}", letters(20 + 9 * i, seed=i % 3), max_new_tokens=120, ignore_eos=True)
        for i in range(12)
    ]
    harness.run(*requests)
    assert harness.scheduler.counters.retractions > 0
    for request in requests:
        assert_as_alone(harness, request)
    harness.scheduler.flush_cache()
    assert harness.free == 6 * 64
