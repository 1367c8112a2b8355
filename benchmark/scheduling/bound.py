"""How many prompt tokens can be found in the cache at best.

**Of any schedule** (``any_schedule``). A token of the union tree that some prompt has must be computed once, unless
a call generates it or has to compute it anyway for its logits; every further use may be a hit. No order and no
eviction gives more, whatever the size of the cache.

**Off-line** (``offline_orders``). An order that was made with the whole trace at hand and is played by one call at a time,
with the best eviction for it. For independent requests it is the DFS order of the union tree, which reaches the
bound above as soon as the cache holds the longest request (Zheng et al. 2024, arXiv:2312.07104, theorem 3.1). Calls that
wait for others can break the DFS order, so this is a schedule and no bound: the best possible lies between the
two, and where they are equal it is known.

**Of an order** (``best_eviction``). Starts and ends of calls happened in some order; which evictions would have been
best? A token that was in use until an end and is reusable at a later start is a *reuse interval* between these two.
It is a hit if its slot is kept all the time, and free if another running call holds the token meanwhile. When
a call ends its whole sequence is in slots, so of the intervals open then only capacity - length fit. To keep as many
intervals as possible, where there are too many give up those that end last: all of them lie over this place, and what
ends later is only in the way of more (Belady's MIN; the exchange argument holds for loads that differ
from place to place). An ancestor is never used later than what hangs below it, so this evicts leaves first, as a
tree must. Slots that other running calls hold at such a moment are not counted against the capacity, so the true best
can only be less.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

from benchmark.scheduling.trace import Trace
from benchmark.scheduling.union import Union

Order = Sequence[tuple[str, int]]
"""("start", call) and ("end", call), each once for every call, as they happened."""


def any_schedule(union: Union) -> int:
    """Most prompt tokens that any schedule with any cache can find in it."""
    uses = [0] * len(union.lengths)
    given = [False] * len(union.lengths)
    for path in union.paths:
        for edge, use in path:
            if use == "reusable":
                uses[edge] += 1
            else:
                given[edge] = True
    return sum(
        length * (n if free else max(0, n - 1))
        for length, n, free in zip(union.lengths, uses, given, strict=True)
    )


def best_eviction(union: Union, order: Order, capacity: int) -> int:
    """Most prompt tokens that calls in this order can find in a cache of so many tokens, by any eviction."""
    hits, opened, closed = _intervals(union, order)
    left: dict[int, int] = {}  # of each open interval: tokens that are kept
    farthest: list[tuple[int, int]] = []
    load = 0
    for at, (kind, call) in enumerate(order):
        if kind == "start":
            for interval in closed.get(at, ()):
                kept = left.pop(interval)
                hits += kept
                load -= kept
            continue
        room = capacity - union.tokens(call)
        while load > room and farthest:
            interval = farthest[0][1]
            dropped = min(left.get(interval, 0), load - room)
            load -= dropped
            if interval in left:
                left[interval] -= dropped
            if not left.get(interval):
                heapq.heappop(farthest)
        for interval, end, length in opened.get(at, ()):
            left[interval] = length
            load += length
            heapq.heappush(farthest, (-end, interval))
    return hits


def _intervals(
    union: Union, order: Order
) -> tuple[int, dict[int, list[tuple[int, int, int]]], dict[int, list[int]]]:
    """Hits that need no slot kept; intervals (number, end, tokens) by the place where they begin; numbers by end."""
    ends = {call: at for at, (kind, call) in enumerate(order) if kind == "end"}
    touches: defaultdict[int, list[tuple[int, int, bool]]] = defaultdict(list)
    for at, (kind, call) in enumerate(order):
        for edge, use in union.paths[call]:
            if use == "generated" and kind == "end":
                touches[edge].append((at, at, False))
            elif use != "generated" and kind == "start":
                touches[edge].append((at, ends[call], use == "reusable"))
    free = number = 0
    opened: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    closed: defaultdict[int, list[int]] = defaultdict(list)
    for edge, found in touches.items():
        held_until = -1
        for start, end, reusable in found:
            if reusable and 0 <= held_until < start:
                opened[held_until].append((number, start, union.lengths[edge]))
                closed[start].append(number)
                number += 1
            elif reusable and held_until >= start:
                free += union.lengths[edge]
            held_until = max(held_until, end)
    return free, opened, closed


def offline_orders(trace: Trace, union: Union) -> list[Order]:
    """Off-line schedules, one call at a time: program by program, and by what calls share."""
    return [one_by_one(calls) for calls in (range(len(trace.calls)), depth_first(trace, union))]


def one_by_one(calls: Sequence[int]) -> list[tuple[str, int]]:
    """Each call starts when the one before has ended."""
    return [event for call in calls for event in (("start", call), ("end", call))]


def depth_first(trace: Trace, union: Union) -> list[int]:
    """All calls; next is always the ready one whose path leaves that of the last one latest, and of equals the shortest,
    so that a prompt comes before those that continue it. O(calls²)."""
    waits = [len(call.after) for call in trace.calls]
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for index, call in enumerate(trace.calls):
        for earlier in call.after:
            followers[earlier].append(index)
    edges = [[edge for edge, _ in path] for path in union.paths]
    sizes = [union.tokens(index) for index in range(len(edges))]
    ready = [index for index, n in enumerate(waits) if not n]
    order: list[int] = []
    while ready:
        last = edges[order[-1]] if order else []
        best = max(ready, key=lambda index: (_shared(union, last, edges[index]), -sizes[index], -index))
        ready.remove(best)
        order.append(best)
        for follower in followers[best]:
            waits[follower] -= 1
            if not waits[follower]:
                ready.append(follower)
    return order


def _shared(union: Union, one: list[int], other: list[int]) -> int:
    tokens = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        tokens += union.lengths[a]
    return tokens
