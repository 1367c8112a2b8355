"""The parts of the scheduler that are functions on plain data: policies, estimates, victims, stop strings."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_fakes import EOS, command, ids, make_vocabulary

from trellis.radix import Node
from trellis.runtime.messages import FinishReason, SamplingParams
from trellis.runtime.scheduler import SchedulerConfig
from trellis.runtime.scheduler.admission import OutputExpectation, future_peak
from trellis.runtime.scheduler.advance import accept_sampled
from trellis.runtime.scheduler.buffer import IntBuffer
from trellis.runtime.scheduler.memory import KVMemory
from trellis.runtime.scheduler.occupancy import Occupancy
from trellis.runtime.scheduler.request import Request
from trellis.runtime.scheduler.retract import Victim, choose_victims
from trellis.runtime.scheduler.stop import StopScanner

# ---- the future peak -------------------------------------------------------------------------------------


def simulated_peak(held: list[int], left: list[int]) -> int:
    return max(
        (
            sum(h + t for h, n in zip(held, left, strict=True) if n >= t)
            for t in range(max(left, default=-1) + 1)
        ),
        default=0,
    )


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=12))
def test_future_peak_equals_a_simulation(requests):
    held, left = [h for h, _ in requests], [n for _, n in requests]
    assert future_peak(held, left) == simulated_peak(held, left)


def test_the_expected_share_falls_with_success_and_rises_after_a_shortage():
    expectation = OutputExpectation(start=0.8, floor=0.2, steps=10)
    assert expectation.expect(100, 0) == 80
    for _ in range(5):
        expectation.step()
    assert expectation.expect(100, 0) == 50
    for _ in range(50):
        expectation.step()
    assert expectation.expect(100, 50) == 10
    assert expectation.expect(100, 99) == 1
    assert expectation.expect(100, 100) == 0
    expectation.shortage()
    assert expectation.share == 0.8
    expectation.shortage()
    assert expectation.share == 1.0
    expectation.idle()
    assert expectation.share == 0.8


# ---- occupancy: the estimate on a real tree --------------------------------------------------------------


def make_request(number: int, tokens: list[int], max_new_tokens: int = 10) -> Request:
    return Request(
        rid=str(number),
        params=SamplingParams(),
        tokens=IntBuffer(tokens),
        prompt_len=len(tokens),
        max_new_tokens=max_new_tokens,
        seed=0,
        arrival=0.0,
        order=number,
        admitted_len=len(tokens),
    )


def simulated_occupancy(requests: list[tuple[Request, int]]) -> int:
    """The peak by stepping: shared slots count once, until the last request that holds them ends."""
    peak = 0
    for t in range(max((left for _, left in requests), default=0) + 1):
        there = [(request, left) for request, left in requests if left >= t]
        slots = {slot for request, _ in there for slot in request.slots.view().tolist()}
        to_prefill = sum(len(request.tokens) - len(request.slots) for request, _ in there)
        peak = max(peak, len(slots) + to_prefill + t * len(there))
    return peak


prompts = st.lists(st.integers(1, 2), min_size=1, max_size=8)


@given(st.lists(st.tuples(prompts, st.integers(0, 12), st.integers(1, 8)), max_size=8))
def test_occupancy_equals_a_simulation_while_a_step_is_planned(entries):
    memory = KVMemory(500)
    running: list[tuple[Request, int]] = []
    occupancy = Occupancy()
    for number, (tokens, left, chunk) in enumerate(entries):
        request = make_request(number, tokens)
        memory.attach(request)
        occupancy.add(request, left)
        end = min(len(tokens), request.computed + chunk)
        assert memory.reserve(request, end - request.computed)
        memory.publish(request, end)
        occupancy.published(request)
        running.append((request, left))
        memory.check([request for request, _ in running])
        assert occupancy.peak() == simulated_occupancy(running)


@given(st.lists(st.tuples(prompts, st.integers(0, 12)), max_size=8))
def test_occupancy_of_running_requests_equals_a_simulation(entries):
    memory = KVMemory(500)
    running: list[tuple[Request, int]] = []
    for number, (tokens, left) in enumerate(entries):
        request = make_request(number, tokens)
        memory.attach(request)
        assert memory.reserve(request, len(tokens) - request.computed)
        memory.publish(request, len(tokens))
        running.append((request, left))
    occupancy = Occupancy()
    for request, left in sorted(running, key=lambda entry: -entry[1]):
        occupancy.add(request, left)
    assert occupancy.peak() == simulated_occupancy(running)


@given(st.lists(prompts, min_size=1, max_size=6), st.sampled_from([1, 2, 4]), st.data())
def test_exclusive_is_what_giving_up_makes_available(prompts_, page, data):
    memory = KVMemory(500, page)
    requests = [make_request(number, tokens) for number, tokens in enumerate(prompts_)]
    for request in requests:
        memory.attach(request)
        assert memory.reserve(request, len(request.tokens) - request.computed)
        memory.publish(request, len(request.tokens))
    request = data.draw(st.sampled_from(requests))
    before, exclusive = memory.available, memory.exclusive(request)
    memory.store(request)
    assert memory.available - before == exclusive


# ---- victims ---------------------------------------------------------------------------------------------


def victims(*costs: int, priority=None) -> list[Victim]:
    priority = priority or [0] * len(costs)
    return [
        Victim(p, cost, demand=0, order=i) for i, (cost, p) in enumerate(zip(costs, priority, strict=True))
    ]


@pytest.mark.parametrize(
    ("costs", "need", "chosen"),
    [
        ([5, 50, 500], 3, [0]),
        ([5, 50, 500], 6, [1]),  # five would not be enough, so only the fifty go
        ([5, 50, 500], 55, [0, 1]),
        ([5, 50, 500], 10_000, [0, 1]),  # one always stays
        ([7, 7, 7], 7, [2]),  # of equals the youngest
        ([9], 1, []),
    ],
)
def test_victims_are_the_cheapest_that_free_enough(costs, need, chosen):
    assert sorted(choose_victims(victims(*costs), need)) == chosen


def test_a_low_priority_goes_before_a_low_cost():
    assert choose_victims(victims(500, 5, priority=[0, 1]), 3) == [0]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 3)), max_size=8),
    st.integers(1, 60),
)
def test_victims_free_enough_or_all_but_one_go(entries, need):
    running = [Victim(p, cost, demand, i) for i, (p, cost, demand) in enumerate(entries)]
    chosen = choose_victims(running, need)
    gained = sum(running[i].cost + running[i].demand for i in chosen)
    assert len(set(chosen)) == len(chosen) <= max(0, len(running) - 1)
    assert gained >= need or len(chosen) == max(0, len(running) - 1)


# ---- stop strings ----------------------------------------------------------------------------------------


def first_stop(text: bytes, stops: list[str]) -> tuple[int, str] | None:
    """End and name of the stop string that is complete first, the longest of those, by trying every end."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop.encode())]
        if done:
            return end, max(done, key=lambda stop: len(stop.encode()))
    return None


@given(
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=4),
    st.lists(st.text(alphabet="abé", max_size=5), max_size=12),
    st.data(),
)
def test_stop_strings_are_found_wherever_tokens_are_cut(stops, words, data):
    text = "".join(words).encode()
    expected = first_stop(text, stops)
    scanner = StopScanner(stops)
    at = 0
    while at < len(text):
        size = data.draw(st.integers(1, 5))
        found = scanner.push(text[at : at + size])
        at += size
        if found is not None:
            assert expected is not None
            assert found == expected[1]
            assert at - size < expected[0] <= at
            return
    assert expected is None


def test_a_stop_string_in_the_middle_of_a_character_is_no_match():
    scanner = StopScanner(["é"])
    first, second = "é".encode()[:1], "é".encode()[1:]
    assert scanner.push(first) is None
    assert scanner.push(second) == "é"


@pytest.mark.parametrize("shown", [True, False])
def test_a_special_token_that_is_shown_separates_the_texts_around_it(shown):
    stop = command("r", "abc", max_new_tokens=9, stop=["xy"], ignore_eos=True, skip_special_tokens=not shown)
    request = Request.from_command(stop, 9, seed=0, arrival=0.0, order=0)
    for token in (*ids("x"), EOS, *ids("y")):
        assert request.closing is None
        accept_sampled(request, token, None, None, make_vocabulary())
    assert request.closing == (None if shown else FinishReason("stop", matched="xy"))
    for token in ids("xy"):
        accept_sampled(request, token, None, None, make_vocabulary())
    assert request.closing == FinishReason("stop", matched="xy")


def test_the_scanner_keeps_only_what_may_become_a_stop_string():
    scanner = StopScanner(["abcd", "x"])
    for _ in range(1000):
        scanner.push(b"abc")
    assert len(scanner._tail) == 3
    assert StopScanner([]).push(b"anything") is None
    assert StopScanner([""]).push(b"anything") is None


# ---- buffers and config ----------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 99), max_size=40), max_size=8))
def test_a_buffer_is_a_list(pieces):
    buffer, expected = IntBuffer(pieces[0] if pieces else ()), list(pieces[0] if pieces else ())
    for piece in pieces[1:]:
        buffer.extend(np.array(piece, np.int32))
        expected.extend(piece)
        buffer.append(7)
        expected.append(7)
        assert buffer.view().tolist() == expected
        assert len(buffer) == len(expected)
    buffer.truncate(3)
    assert buffer.view().tolist() == expected[:3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_total_tokens", 0),
        ("chunked_prefill_size", 0),
        ("max_running_requests", -1),
        ("prefill_min_share", 0.0),
        ("output_share_floor", 0.9),
        ("max_overtake_s", -1.0),
    ],
)
def test_a_senseless_config_is_refused_by_name(field, value):
    good = {"max_total_tokens": 10, "context_length": 10}
    with pytest.raises(ValueError, match=re.escape(field)):
        SchedulerConfig(**{**good, field: value})


def test_nodes_count_locks_as_the_memory_expects():
    memory = KVMemory(50)
    one, two = make_request(1, [1, 2, 3, 4]), make_request(2, [1, 2, 5, 6])
    for request in (one, two):
        memory.attach(request)
        assert memory.reserve(request, 4 - request.computed)
        memory.publish(request, 4)
    assert isinstance(one.node, Node)
    assert [node.locks for node in one.node.ancestry()][:2] == [1, 2]
    assert memory.exclusive(one) == 2
