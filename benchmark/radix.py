"""Cost of the radix cache as its tree grows: ``python -m benchmark.radix``.

Each tree has 64 conversations of 4,000 tokens in 16 turns, and for the rest short prompts: prefixes of 16
tokens with four continuations of 16 tokens each. Operations go to random places, so a large tree is met cold,
as in service: what a large tree costs more is the time of the memory, an operation visits the same nodes in all.
The trees take turns, ``--rounds`` times; a time is the median of all its samples, and the last column the median over
the rounds of the cost at the largest size over that at the smallest.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from trellis.radix import POLICIES, RadixCache, SlotPool

CONVERSATIONS, TURNS, TURN_TOKENS = 64, 16, 250
FANOUT, SHORT_TOKENS = 4, 16
EVICT_TOKENS, EVICTIONS = 1_000, 10
DEEP_NODES = 250

Times = dict[str, list[float]]
"""Samples in µs, by what was measured."""


@dataclass
class Built:
    cache: RadixCache
    rng: np.random.Generator
    conversations: list[np.ndarray]
    deep: np.ndarray
    short: list[np.ndarray]
    node_bytes: float
    next_slot: int


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
    return Built(cache, rng, conversations, deep, samples, grown / cache.nodes, next_slot)


def microseconds(repeats: int, operation: Callable[[int], object]) -> list[float]:
    times = []
    for i in range(repeats):
        begin = time.perf_counter()
        operation(i)
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def measure(built: Built, repeats: int) -> Times:
    """Samples of every operation. The tree is about as large afterwards."""
    cache, rng = built.cache, built.rng
    picks = rng.integers(len(built.short), size=repeats)
    nodes = [cache.match(tokens).node for tokens in built.conversations]
    tails = rng.integers(1 << 17, size=(repeats, len(built.short[0])), dtype=np.int32)
    prompts = [np.concatenate([built.short[pick], tails[i]]) for i, pick in enumerate(picks)]
    first = built.next_slot
    built.next_slot += repeats * len(prompts[0])
    slots = np.arange(first, built.next_slot, dtype=np.int32).reshape(repeats, -1)

    def lock_and_unlock(i: int) -> None:
        cache.lock(nodes[i % CONVERSATIONS])
        cache.unlock(nodes[i % CONVERSATIONS])

    operations: dict[str, tuple[int, Callable[[int], object]]] = {
        "match 4,000 tokens in 16 nodes": (
            repeats,
            lambda i: cache.match(built.conversations[i % CONVERSATIONS]),
        ),
        f"match {len(built.deep):,} tokens in {DEEP_NODES} nodes": (
            repeats,
            lambda _: cache.match(built.deep),
        ),
        "peek of a short prompt": (repeats, lambda i: cache.peek(built.short[picks[i]])),
        "match of a short prompt": (repeats, lambda i: cache.match(built.short[picks[-1 - i]])),
        "lock and unlock 16 nodes": (repeats, lock_and_unlock),
        "insert a leaf below a short prompt": (repeats, lambda i: cache.insert(prompts[i], slots[i])),
        "snapshot of 200 nodes": (20, lambda _: cache.snapshot(200, 32)),
        f"evict {EVICT_TOKENS:,} tokens": (EVICTIONS, lambda _: cache.evict(EVICT_TOKENS)),
    }
    return {name: microseconds(*operation) for name, operation in operations.items()}


def measure_whole(cache: RadixCache) -> Times:
    """What looks at every node, by the node; the tree is empty afterwards."""
    operations: dict[str, Callable[[], object]] = {"check, a node": cache.check, "flush, a node": cache.flush}
    nodes = cache.nodes
    return {name: [microseconds(1, lambda _, run=run: run())[0] / nodes] for name, run in operations.items()}


def measure_pool(repeats: int) -> float:
    pool = SlotPool(1 << 20)

    def cycle(_: int) -> None:
        slots = pool.alloc(4_000)
        assert slots is not None
        pool.release(slots)

    return statistics.median(microseconds(repeats, cycle))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="lru")
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    trees = [build(nodes, args.page_size, args.policy) for nodes in args.nodes]
    gc.freeze()  # so that no pass of the collector falls into a measurement
    rounds = [[measure(tree, args.repeats) for tree in trees] for _ in range(args.rounds)]
    gc.unfreeze()
    collecting = microseconds(1, lambda _: gc.collect())[0] / sum(tree.cache.nodes for tree in trees)
    rounds.append([measure_whole(tree.cache) for tree in trees])
    print(f"policy {args.policy}, page size {args.page_size}; times in µs")
    print(f"{'operation':40}" + "".join(f"{nodes:>12,}" for nodes in args.nodes) + "   last/first")
    for name in [*rounds[0][0], *rounds[-1][0]]:
        print_row(name, [[times[name] for times in taken] for taken in rounds if name in taken[0]])
    print_row("bytes a node beyond tokens and slots", [[[tree.node_bytes] for tree in trees]])
    print(f"{'full pass of the cyclic collector, a node':40}{collecting:>12,.2f}")
    print(f"{'alloc and release 4,000 slots of 1M':40}{measure_pool(args.repeats):>12,.1f}")


def print_row(name: str, rounds: list[list[list[float]]]) -> None:
    """rounds: of each round, of each tree, the samples."""
    medians = [statistics.median(chain.from_iterable(samples)) for samples in zip(*rounds, strict=True)]
    ratios = [statistics.median(taken[-1]) / statistics.median(taken[0]) for taken in rounds]
    cells = "".join(f"{value:>12,.{1 if value >= 1 else 2}f}" for value in medians)
    print(f"{name:40}{cells}{statistics.median(ratios):>12.2f}×")


if __name__ == "__main__":
    main()
