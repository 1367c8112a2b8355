"""Cost of the radix cache as its tree grows: ``python -m benchmark.radix``.

Each tree has 64 conversations of 4,000 tokens in 16 turns, and for the rest short prompts: prefixes of 16
tokens with four continuations of 16 tokens each. Operations go to random places, so a large tree is met cold,
as in service. Times are medians; the last column is the cost at the largest size over that at the smallest.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trellis.radix import POLICIES, RadixCache, SlotPool

CONVERSATIONS, TURNS, TURN_TOKENS = 64, 16, 250
FANOUT, SHORT_TOKENS = 4, 16
EVICT_TOKENS = 1_000
DEEP_NODES = 250


@dataclass
class Built:
    cache: RadixCache
    rng: np.random.Generator
    conversations: list[np.ndarray]
    deep: np.ndarray
    short: list[np.ndarray]
    node_bytes: float
    times: dict[str, float] = field(default_factory=dict)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def whole(n: int, page: int) -> int:
    return max(page, n - n % page)


def build(nodes: int, page: int, policy: str, seed: int = 0) -> Built:
    """A tree of about ``nodes`` nodes; memory is the growth of the resident set, less tokens and slots."""
    rng = np.random.default_rng(seed)
    short, turn = max(page, SHORT_TOKENS), whole(TURN_TOKENS, page)
    cache = RadixCache(page_size=page, policy=policy)
    conversations = [rng.integers(1 << 17, size=TURNS * turn, dtype=np.int32) for _ in range(CONVERSATIONS)]
    deep = rng.integers(1 << 17, size=DEEP_NODES * max(page, SHORT_TOKENS), dtype=np.int32)
    samples: list[np.ndarray] = []
    next_slot = 1
    gc.collect()
    before = resident_bytes()

    def insert(tokens: np.ndarray) -> None:
        nonlocal next_slot
        cache.insert(tokens, np.arange(next_slot, next_slot + len(tokens), dtype=np.int32))
        next_slot += len(tokens)

    for conversation in conversations:
        for k in range(1, TURNS + 1):
            insert(conversation[: k * turn])
    for k in range(1, DEEP_NODES + 1):
        insert(deep[: k * short])
    while cache.nodes < nodes:
        words = rng.integers(1 << 17, size=(FANOUT + 1, short), dtype=np.int32)
        insert(words[0])
        for leaf in words[1:]:
            insert(np.concatenate([words[0], leaf]))
        if len(samples) < 20_000:
            samples.append(np.concatenate([words[0], words[1]]))
    grown = resident_bytes() - before - 8 * cache.total - len(samples) * sys.getsizeof(samples[0])
    return Built(cache, rng, conversations, deep, samples, grown / cache.nodes)


def median_us(repeats: int, operation: Callable[[int], object]) -> float:
    times = []
    for i in range(repeats):
        begin = time.perf_counter()
        operation(i)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def measure(built: Built, repeats: int) -> None:
    cache, rng, times = built.cache, built.rng, built.times
    picks = rng.integers(len(built.short), size=repeats)
    times["match 4,000 tokens in 16 nodes"] = median_us(
        repeats, lambda i: cache.match(built.conversations[i % CONVERSATIONS])
    )
    times[f"match {len(built.deep):,} tokens in {DEEP_NODES} nodes"] = median_us(
        repeats, lambda _: cache.match(built.deep)
    )
    times["peek of a short prompt"] = median_us(repeats, lambda i: cache.peek(built.short[picks[i]]))
    times["match of a short prompt"] = median_us(repeats, lambda i: cache.match(built.short[picks[i]]))
    nodes = [cache.match(tokens).node for tokens in built.conversations]

    def lock_and_unlock(i: int) -> None:
        cache.lock(nodes[i % CONVERSATIONS])
        cache.unlock(nodes[i % CONVERSATIONS])

    times["lock and unlock 16 nodes"] = median_us(repeats, lock_and_unlock)
    tails = rng.integers(1 << 17, size=(repeats, len(built.short[0])), dtype=np.int32)
    slots = np.arange(repeats * tails.shape[1] * 2, dtype=np.int32).reshape(repeats, -1) + (1 << 28)
    prompts = [np.concatenate([built.short[pick], tails[i]]) for i, pick in enumerate(picks)]
    times["insert a leaf below a short prompt"] = median_us(
        repeats, lambda i: cache.insert(prompts[i], slots[i])
    )
    times["snapshot of 200 nodes"] = median_us(20, lambda _: cache.snapshot(200, 32))
    times[f"evict {EVICT_TOKENS:,} tokens"] = median_us(
        min(repeats, cache.evictable // (4 * EVICT_TOKENS)), lambda _: cache.evict(EVICT_TOKENS)
    )
    measure_whole(cache, times)


def measure_whole(cache: RadixCache, times: dict[str, float]) -> None:
    """What looks at every node, by the node; the tree is empty afterwards."""
    nodes = cache.nodes
    gc.unfreeze()
    times["full pass of Python's collector, a node"] = median_us(1, lambda _: gc.collect()) / nodes
    times["check, a node"] = median_us(1, lambda _: cache.check()) / nodes
    times["flush, a node"] = median_us(1, lambda _: cache.flush()) / nodes


def measure_pool(repeats: int) -> float:
    pool = SlotPool(1 << 20)

    def cycle(_: int) -> None:
        slots = pool.alloc(4_000)
        assert slots is not None
        pool.release(slots)

    return median_us(repeats, cycle)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="lru")
    parser.add_argument("--repeats", type=int, default=400)
    args = parser.parse_args()
    columns: list[dict[str, float]] = []
    for nodes in args.nodes:
        built = build(nodes, args.page_size, args.policy)
        gc.freeze()  # so that no pass of the collector falls into a measurement
        measure(built, args.repeats)
        columns.append({**built.times, "bytes a node beyond tokens and slots": built.node_bytes})
        del built
        gc.collect()
    print(f"policy {args.policy}, page size {args.page_size}; times in µs")
    print(f"{'operation':40}" + "".join(f"{nodes:>12,}" for nodes in args.nodes) + "   last/first")
    for row in columns[0]:
        values = [column[row] for column in columns]
        cells = "".join(f"{value:>12,.{1 if value >= 1 else 2}f}" for value in values)
        print(f"{row:40}{cells}{values[-1] / values[0]:>12.2f}×")
    print(f"{'alloc and release 4,000 slots of 1M':40}{measure_pool(args.repeats):>12,.1f}")


if __name__ == "__main__":
    main()
