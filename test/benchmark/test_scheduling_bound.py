"""The bounds on hit rates against brute force: every order and every eviction on traces of a few tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.scheduling.bound import any_schedule, best_eviction, offline_orders, one_by_one
from benchmark.scheduling.trace import Call, Trace
from benchmark.scheduling.union import unite

Prefix = tuple[int, ...]


@st.composite
def small_traces(draw: st.DrawFn) -> Trace:
    """Up to four calls over two letters; some wait for others, some go on from what these said, some score."""
    calls: list[Call] = []
    for index in range(draw(st.integers(1, 4))):
        earlier = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        begun: list[int] = []
        if earlier and draw(st.booleans()):
            begun = calls[min(earlier)].computed.tolist()[:5]
        prompt = begun + draw(st.lists(st.integers(1, 2), min_size=1, max_size=4))
        score = draw(st.sampled_from([-1, -1, len(prompt) - 1]))
        output = [] if score > 0 else [10 + index] * draw(st.integers(1, 2))
        limit = 0 if score > 0 else len(output) + draw(st.integers(0, 1))
        score_from = score if score > 0 else -1
        calls.append(
            Call(
                _ints(prompt),
                _ints(output),
                limit if output else 0,
                index,
                tuple(sorted(earlier)),
                0.0,
                score_from,
            )
        )
    return Trace("small", tuple(calls))


def _ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def prefixes(tokens: np.ndarray) -> list[Prefix]:
    return [tuple(tokens[: n + 1].tolist()) for n in range(len(tokens))]


def allowed_orders(trace: Trace) -> Iterator[tuple[int, ...]]:
    for order in itertools.permutations(range(len(trace.calls))):
        place = {call: at for at, call in enumerate(order)}
        if all(place[e] < place[i] for i, call in enumerate(trace.calls) for e in call.after):
            yield order


def brute_force(trace: Trace, order: tuple[int, ...], capacity: int) -> int:
    """Most hits over all ways to evict, one call at a time: every set that may stay in the cache is tried."""
    best: dict[frozenset[Prefix], int] = {frozenset(): 0}
    for index in order:
        call = trace.calls[index]
        path = prefixes(call.computed)
        after: dict[frozenset[Prefix], int] = {}
        for cache, hits in best.items():
            found = 0
            while found < call.reusable and path[found] in cache:
                found += 1
            others = sorted(cache - set(path))
            room = capacity - len(path)
            for n in range(min(room, len(others)) + 1):
                for kept in itertools.combinations(others, n):
                    for held in _closed_parts(path):
                        state = frozenset((*kept, *held))
                        after[state] = max(after.get(state, 0), hits + found)
        best = after
    return max(best.values())


def _closed_parts(path: list[Prefix]) -> list[list[Prefix]]:
    return [path[:n] for n in range(len(path) + 1)]


def longest(trace: Trace) -> int:
    return max(len(call.computed) for call in trace.calls)


@settings(max_examples=60, deadline=None)
@given(small_traces(), st.integers(0, 3))
def test_the_eviction_bound_is_the_best_that_any_eviction_reaches(trace: Trace, spare: int) -> None:
    capacity = longest(trace) + spare
    union = unite(trace)
    for order in allowed_orders(trace):
        assert best_eviction(union, one_by_one(order), capacity) == brute_force(trace, order, capacity)


@settings(max_examples=60, deadline=None)
@given(small_traces(), st.integers(0, 20))
def test_no_order_and_no_eviction_passes_the_bound_of_any_schedule(trace: Trace, spare: int) -> None:
    capacity = longest(trace) + spare
    union = unite(trace)
    best = max(brute_force(trace, order, capacity) for order in allowed_orders(trace))
    assert best <= any_schedule(union)
    offline = max(best_eviction(union, order, capacity) for order in offline_orders(trace, union))
    assert offline <= best


@settings(max_examples=200, deadline=None)
@given(small_traces())
def test_every_token_stands_once_in_the_union(trace: Trace) -> None:
    union = unite(trace)
    distinct = {prefix for call in trace.calls for prefix in prefixes(call.computed)}
    assert union.working_set == len(distinct)
    for index, call in enumerate(trace.calls):
        assert union.tokens(index) == len(call.computed)
        by_use = {
            use: sum(union.lengths[e] for e, u in union.paths[index] if u == use)
            for _, use in union.paths[index]
        }
        assert by_use.get("reusable", 0) == call.reusable
        assert by_use.get("generated", 0) == len(call.computed) - len(call.prompt)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=8))
def test_depth_first_reaches_the_bound_with_a_cache_for_the_longest_request(prompts: list[list[int]]) -> None:
    """Theorem 3.1 of arXiv:2312.07104: independent requests, one output token."""
    calls = tuple(Call(_ints(p), _ints([9]), 1, i) for i, p in enumerate(prompts))
    trace = Trace("independent", calls)
    union = unite(trace)
    reached = max(best_eviction(union, order, longest(trace)) for order in offline_orders(trace, union))
    assert reached == any_schedule(union)


def test_two_conversations_that_take_turns_need_a_slot_for_both() -> None:
    turns = [[1, 2], [5, 6], [1, 2, 3], [5, 6, 7]]
    calls = tuple(
        Call(_ints(t), _ints([9]), 1, i % 2, (i - 2,) if i > 1 else ()) for i, t in enumerate(turns)
    )
    union = unite(Trace("turns", calls))
    assert any_schedule(union) == 4
    assert best_eviction(union, one_by_one(range(4)), 5) == 4
    assert best_eviction(union, one_by_one(range(4)), 4) == 3
    assert best_eviction(union, one_by_one([0, 2, 1, 3]), 3) == 4
