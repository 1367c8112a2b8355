"""Large pages, end to end: only whole pages are shared, and everything else stays exact."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_fakes import Harness, assert_as_alone, choices, command

from trellis.runtime.attention.paged_layout import lay_out
from trellis.runtime.executor.batch import flatten
from trellis.runtime.scheduler.admission import future_peak
from trellis.runtime.scheduler.memory import KVMemory
from trellis.runtime.scheduler.request import Request

PAGES = [1, 4, 16, 64]


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
    assert harness.free + harness.cached == harness.size == 1_000 // page * page
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


# ---- slots are taken in whole pages ------------------------------------------------------------------------


def check_layouts(harness: Harness) -> None:
    """From here on every batch must be readable in pages: ``lay_out`` raises MisalignedPages otherwise."""
    forward, page = harness.runner.forward, harness.config.page_size

    def checked(extends):
        layout = lay_out(flatten(extends), page)
        ends = [len(extend.slots) for extend in extends]
        assert layout.lengths.tolist() == ends
        assert page == 1 or layout.indices.min() > 0, "page 0 is the sink's"
        return forward(extends)

    harness.runner.forward = checked


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_tokens_of_every_request_fill_pages_in_order(page: int, overlap: bool) -> None:
    """With chunks that end inside of pages, shared prefixes, drafts that do not come, and requests that give way."""
    harness = Harness(
        pool=5 * 64,
        page_size=page,
        chunked_prefill_size=13,
        overlap=overlap,
        output_share_start=0.02,
        output_share_floor=0.01,
    )
    check_layouts(harness)
    plain = [
        command(f"r{i}", letters(20 + 9 * i, seed=i % 3), max_new_tokens=60, ignore_eos=True)
        for i in range(8)
    ]
    texts = choices("helloworld", "helpisnear", "hold")
    limited = [
        command(f"c{i}", letters(30 + i), 12, constraint=texts, temperature=1.0, seed=i) for i in range(6)
    ]
    harness.run(*plain, *limited)
    assert harness.scheduler.counters.retractions > 0
    assert harness.scheduler.counters.drafted_tokens > harness.scheduler.counters.accepted_draft_tokens
    for request in [*plain, *limited]:
        assert harness.answer(request.rid).finish.type in ("stop", "length")
        assert_as_alone(harness, request)


@pytest.mark.parametrize("page", PAGES)
def test_the_last_page_of_a_running_request_is_its_own_and_is_freed_at_its_end(page: int) -> None:
    harness = Harness(pool=640, page_size=page)
    harness.scheduler.add([command("r", letters(70), max_new_tokens=5, ignore_eos=True)])
    harness.step()
    shared = 70 // page * page
    assert harness.cached == shared
    assert harness.free == 640 - -(-70 // page) * page, "the page where it ends is taken whole"
    harness.run()
    computed = 70 + 4  # the last token's K/V is not wanted
    assert harness.cached == computed // page * page
    assert harness.free == 640 - harness.cached


@pytest.mark.parametrize("page", PAGES)
def test_forks_share_whole_pages_and_have_their_last_pages_apart(page: int) -> None:
    harness = Harness(pool=1_280, page_size=page)
    check_layouts(harness)
    prefix = letters(100)
    forks = [command(f"f{i}", [*prefix, 1 + i, 2], max_new_tokens=9, ignore_eos=True) for i in range(4)]
    harness.scheduler.add(forks)
    harness.step()
    running = harness.scheduler.roster.running
    assert len(running) == 4
    tails = [slot for request in running for slot in request.slots.view(100 // page * page).tolist()]
    assert len(set(tails)) == len(tails)
    harness.run()
    for fork in forks:
        assert_as_alone(harness, fork)


@pytest.mark.parametrize("page", [4, 16])
def test_a_pool_is_used_in_whole_pages_to_the_last(page: int) -> None:
    harness = Harness(pool=6 * page + page - 1, page_size=page, chunked_prefill_size=page + 3)
    assert harness.size == harness.free == 6 * page
    whole = command("whole", letters(6 * page - 1, seed=1), max_new_tokens=1, ignore_eos=True)
    assert len(harness.run(whole)["whole"].token_ids) == 1, "its last chunk is in a page that it has"
    refused = harness.run(command("long", letters(6 * page), max_new_tokens=1))["long"]
    assert refused.finish.type == "abort"
    assert f"at most {6 * page - 1}" in refused.finish.message
    request = command("fits", letters(5 * page), max_new_tokens=10_000, ignore_eos=True)
    answer = harness.run(request)["fits"]
    assert len(answer.token_ids) == page
    assert_as_alone(harness, request)


@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_what_admission_promises_in_pages_is_kept(page: int, seed: int) -> None:
    """Requests that are expected to use all of their tokens never have to give way."""
    rng = random.Random(seed)
    harness = Harness(pool=8 * page + 40, page_size=page, output_share_start=1.0, output_share_floor=1.0)
    requests = [
        command(f"r{i}", letters(rng.randint(1, 20), i), max_new_tokens=rng.randint(1, 40), ignore_eos=True)
        for i in range(40)
    ]
    harness.run(*requests)
    assert harness.scheduler.counters.retractions == 0
    assert max(len(batch) for batch in harness.runner.batches) > 1
    for request in requests:
        assert_as_alone(harness, request)


def make_request(number: int, tokens: int) -> Request:
    prompt = command(f"r{number}", letters(tokens, number))
    return Request.from_command(prompt, max_new_tokens=9, seed=0, arrival=0.0, order=number)


@given(
    page=st.sampled_from([1, 2, 4, 16]),
    moves=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["take", "trim", "drop"]), st.integers(0, 40))
    ),
)
def test_slots_are_taken_and_given_back_by_the_page(page: int, moves: list[tuple[int, str, int]]) -> None:
    memory = KVMemory(150, page)
    requests = [make_request(number, 5) for number in range(4)]
    for index, move, n in moves:
        request, before = requests[index], memory.available
        had = len(request.slots)
        if move == "take":
            price, fits = memory.taken(request, n), n <= memory.room(request)
            assert price % page == 0
            assert fits == (price <= before)
            assert memory.reserve(request, n) == fits
            assert len(request.slots) == had + n * fits
            assert memory.available == before - price * fits
        elif move == "trim":
            request.computed = min(n, had)
            memory.trim(request)
            kept = -(-request.computed // page) * page
            assert len(request.slots) == request.computed
            assert memory.available - before == -(-had // page) * page - kept
        else:
            memory.drop(request)
            assert memory.available - before == -(-had // page) * page
        memory.check(requests)
        assert memory.drift(requests) == 0
        assert memory.pool.free + sum(map(memory.private, requests)) == memory.size == 150 - 150 % page


@given(
    page=st.sampled_from([1, 2, 4, 16]),
    entries=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=10),
)
def test_the_future_peak_counts_whole_pages(page: int, entries: list[tuple[int, int]]) -> None:
    """Against a simulation, step by step."""
    steps = range(1 + max((left for _, left in entries), default=0))
    held = [sum(-(-(h + t) // page) * page for h, left in entries if left >= t) for t in steps]
    peak = future_peak(*np.array(entries, np.int64).reshape(-1, 2).T, page)
    assert peak == max(held)
