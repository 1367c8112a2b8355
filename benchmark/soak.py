"""Random load on the real model, and what must be true of it: ``python -m benchmark.soak --seconds 600``.

In one process, a pool that is too small for the load gets shared prefixes, forks, constraints, scores, aborts,
clients that give up, flushes, switched policies and bad requests. It prints a line every few seconds, and at
the end whether each bar held: every request ended, every slot is accounted for, memory and threads are flat.
Exit status 1 when a bar failed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import resource
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trellis.errors import RequestAborted, TrellisError
from trellis.runtime.config import SCHEDULE_POLICIES, ServerConfig
from trellis.runtime.engine import InProcessEngine
from trellis.runtime.manager.types import GenerateInput
from trellis.runtime.messages import Constraint, SamplingParams

POOL, CONTEXT, RUNNING = 4_000, 1_024, 12
LOST_AFTER = 120.0  # seconds after which a request that has not ended is lost
# Of the samples, the first third is warm-up, in which bounded caches fill. The median of the last third may be so much
# above the median of the middle one: single samples move by more, which is why these are medians.
RSS_GROWTH = 0.02
MORE_THREADS = 4
RARE = 16

WORDS = [
    "red",
    "green",
    "blue",
    "tree",
    "river",
    "stone",
    "cloud",
    "lamp",
    "house",
    "garden",
    "winter",
    "summer",
    "bread",
    "water",
    "paper",
    "music",
]
CONSTRAINTS = (
    Constraint("regex", r"[A-Z][a-z]{2,9}, [0-9]{1,3} years"),
    Constraint("choices", '["yes", "no", "perhaps"]'),
    Constraint(
        "schema",
        '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}',
    ),
)
BAD = (
    {"prompt": ""},
    {"prompt": "x", "constraint": Constraint("regex", "(unclosed")},
    {"prompt": "x", "constraint": Constraint("schema", '{"$ref": "http://example.com"}')},
    {"prompt": "x", "params": SamplingParams(temperature=-1.0)},
    {"prompt": [5] * (CONTEXT + 1)},
)


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


@dataclass
class Sample:
    at: float
    rss_mb: float
    threads: int


@dataclass
class Soak:
    """One run. ended: how many calls ended in which way. begun: how many there were; named: those with an id."""

    engine: InProcessEngine
    seconds: float
    rng: random.Random
    ended: Counter[str] = field(default_factory=Counter)
    begun: int = 0
    named: int = 0
    tokens: int = 0
    samples: list[Sample] = field(default_factory=list)
    start: float = 0.0

    def __post_init__(self) -> None:
        self.prefixes = [" ".join(self.rng.choices(WORDS, k=n)) for n in (60, 150, 300, 500)]
        # So few that they are all in the cache of grammars after the warm-up: it keeps up to 256 MB of them, and for hours
        # its filling would look as a leak does.
        self.rare = [Constraint("choices", f'["{self.rng.random()}", "none"]') for _ in range(RARE)]
        self.actions: list[tuple[int, Callable[[], Awaitable[str]]]] = [
            (8, self.one),
            (4, self.fork),
            (5, self.constrained),
            (2, self.scored),
            (3, self.aborted),
            (3, self.given_up),
            (3, self.refused),
            (1, self.flushed),
            (1, self.repoliced),
        ]

    # ---- what clients do -----------------------------------------------------------------------------

    def prompt(self) -> str:
        begin = self.rng.choice(self.prefixes)
        cut = begin[: self.rng.randrange(1, len(begin))] if self.rng.random() < 0.3 else begin
        return f"{cut} {' '.join(self.rng.choices(WORDS, k=self.rng.randrange(1, 30)))}"

    def request(self, **more: Any) -> GenerateInput:
        params = SamplingParams(
            max_new_tokens=self.rng.choice([0, 1, 4, 16, 48]), temperature=self.rng.choice([0.0, 0.8])
        )
        given = {"prompt": self.prompt(), "params": params, "namespace": self.rng.choice(["", "", "", "a"])}
        return GenerateInput(**{**given, **more})

    async def one(self) -> str:
        result = await self.engine.manager.generate(self.request(return_logprob=self.rng.random() < 0.3))
        self.tokens += len(result.token_ids)
        return "generated"

    async def fork(self) -> str:
        prompt = self.prompt()
        branches = [
            self.request(prompt=f"{prompt} {word}", namespace="") for word in self.rng.sample(WORDS, 4)
        ]
        results = await self.engine.manager.generate_many(branches)
        self.tokens += sum(len(result.token_ids) for result in results)
        return "forked"

    async def constrained(self) -> str:
        constraint = self.rng.choice(CONSTRAINTS)
        if self.rng.random() < 0.3:  # in the beginning, one that nobody has compiled before
            constraint = self.rng.choice(self.rare)
        params = SamplingParams(max_new_tokens=40, temperature=0.8)
        result = await self.engine.manager.generate(self.request(constraint=constraint, params=params))
        self.tokens += len(result.token_ids)
        return "constrained"

    async def scored(self) -> str:
        await self.engine.manager.score(self.prompt(), [" yes", " no", " perhaps"])
        return "scored"

    async def aborted(self) -> str:
        self.named += 1
        rid = f"abort-{self.named}"
        params = SamplingParams(max_new_tokens=300, ignore_eos=True)
        work = asyncio.ensure_future(self.engine.manager.generate(self.request(rid=rid, params=params)))
        await asyncio.sleep(self.rng.random())
        self.engine.manager.abort(rid)
        try:
            await work
        except RequestAborted:
            return "aborted"
        return "aborted too late"

    async def given_up(self) -> str:
        params = SamplingParams(max_new_tokens=300, ignore_eos=True)
        work = self.engine.manager.generate(self.request(params=params))
        try:
            await asyncio.wait_for(work, self.rng.random())
        except asyncio.TimeoutError:
            return "given up"
        return "generated"

    async def refused(self) -> str:
        try:
            await self.engine.manager.generate(self.request(**self.rng.choice(BAD)))
        except TrellisError:
            return "refused"
        return "WRONGLY TAKEN"

    async def flushed(self) -> str:
        await asyncio.to_thread(self.engine.control, "flush_cache")
        return "flushed"

    async def repoliced(self) -> str:
        name = self.rng.choice(sorted(SCHEDULE_POLICIES))
        await asyncio.to_thread(self.engine.control, "set_policy", name=name)
        return "policy set"

    # ---- the run -------------------------------------------------------------------------------------

    async def client(self) -> None:
        weights, actions = zip(*self.actions, strict=True)
        while time.monotonic() - self.start < self.seconds:
            self.begun += 1
            action = self.rng.choices(actions, weights)[0]
            try:
                how = await asyncio.wait_for(action(), LOST_AFTER)
            except asyncio.TimeoutError:
                how = "LOST"
            except TrellisError as error:
                how = f"FAILED: {error}"
            except Exception as error:
                how = f"CRASHED: {type(error).__name__}: {error}"
            self.ended[how] += 1

    async def watch(self, every: float) -> None:
        while True:
            await asyncio.sleep(every)
            stats = await asyncio.to_thread(self.engine.control, "stats")
            now = Sample(time.monotonic() - self.start, resident_mb(), threading.active_count())
            self.samples.append(now)
            print(
                f"{now.at:6.0f} s  {self.begun:6} calls  {self.tokens:7} tokens  hit rate {stats['hit_rate']:4.0%}  "
                f"retracted {stats['retractions']:4}  in flight {self.engine.manager.in_flight:3}  "
                f"{now.rss_mb:7.1f} MB  {now.threads} threads",
                flush=True,
            )

    async def fill(self) -> None:
        """Use every slot once: memory that was never written to is not resident yet."""
        params = SamplingParams(max_new_tokens=1)
        size = CONTEXT // 2
        count = 2 * (self.engine.config.max_total_tokens or 0) // size
        prompts = [[self.rng.randrange(100, 40_000) for _ in range(size)] for _ in range(count)]
        await self.engine.manager.generate_many([GenerateInput(prompt=p, params=params) for p in prompts])

    async def run(self, clients: int, every: float) -> None:
        await self.fill()
        self.start = time.monotonic()
        watching = asyncio.ensure_future(self.watch(every))
        await asyncio.gather(*(self.client() for _ in range(clients)))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def settled_stats(engine: InProcessEngine) -> dict[str, Any]:
    """The statistics once the scheduler has heard of every abort; at most ten seconds from now."""
    end = time.monotonic() + 10
    while True:
        stats: dict[str, Any] = engine.control("stats")
        busy = stats["running_requests"] + stats["waiting_requests"] + stats["compiling_requests"]
        if not busy or time.monotonic() > end:
            return stats
        time.sleep(0.05)


def bars(soak: Soak) -> list[tuple[str, bool, str]]:
    """Name, whether it held, and the figures."""
    stats = settled_stats(soak.engine)
    owned = stats["free_tokens"] + stats["evictable_tokens"]
    soak.engine.control("flush_cache")
    after = soak.engine.control("stats")
    wrong = [how for how in soak.ended if how[:2].isupper()]
    warm = soak.samples[len(soak.samples) // 3 :]
    middle, drift = growth(warm)
    threads = warm[-1].threads - warm[0].threads
    return [
        (
            "every call ended, as it should",
            not wrong and sum(soak.ended.values()) == soak.begun,
            str(dict(soak.ended)),
        ),
        ("nothing is in flight", soak.engine.manager.in_flight == 0, f"{soak.engine.manager.in_flight}"),
        (
            "every request of the scheduler ended",
            stats["finished"] == stats["requests"],
            f"{stats['finished']}",
        ),
        (
            "slots exact",
            owned == stats["pool_tokens"],
            f"{owned} of {stats['pool_tokens']} free or evictable",
        ),
        ("empty after a flush", after["free_tokens"] == after["pool_tokens"], f"{after['free_tokens']} free"),
        (
            "books never wrong, no step failed",
            stats["drifts"] == stats["failed_steps"] == 0,
            f"{stats['drifts']}",
        ),
        (
            f"resident memory flat (at most {RSS_GROWTH:.0%} more)",
            drift <= RSS_GROWTH * middle,
            f"{drift:+.1f} MB on {middle:.1f} MB from the middle third of the run to the last, "
            f"{slope(warm):+.2f} MB a minute over {warm[-1].at - warm[0].at:.0f} s",
        ),
        (f"threads flat (at most {MORE_THREADS} more)", threads <= MORE_THREADS, f"{threads:+}"),
    ]


def growth(samples: Sequence[Sample]) -> tuple[float, float]:
    """MB: the median of the first half, and by how much that of the second is above it."""
    half = len(samples) // 2
    if half == 0:
        raise ValueError(
            "too few samples to tell how memory grows; make the run longer, or sample more often"
        )
    first, second = (statistics.median(s.rss_mb for s in part) for part in (samples[:half], samples[half:]))
    return first, second - first


def slope(samples: Sequence[Sample]) -> float:
    """MB a minute, by least squares."""
    return 60 * statistics.linear_regression([s.at for s in samples], [s.rss_mb for s in samples]).slope


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--pool", type=int, default=POOL, help="tokens")
    parser.add_argument("--page-size", type=int, default=1)
    args = parser.parse_args(argv)
    config = ServerConfig(
        model_path=args.model,
        dtype=args.dtype,
        max_total_tokens=args.pool,
        context_length=CONTEXT,
        max_running_requests=RUNNING,
        chunked_prefill_size=256,
        page_size=args.page_size,
    )
    with InProcessEngine(config) as engine:
        soak = Soak(engine, args.seconds, random.Random(args.seed))
        asyncio.run(soak.run(args.clients, min(args.every, args.seconds / 4)))
        gc.collect()
        results = bars(soak)
    for name, held, figures in results:
        print(f"{'ok  ' if held else 'FAIL'}  {name}: {figures}")
    return 0 if all(held for _, held, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
