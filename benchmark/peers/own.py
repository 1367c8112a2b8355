"""Trellis against itself, in one process: without its cache, and without a constraint."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from benchmark.peers.measure import Measurable, Ratio, Sample, alone, alternate, ratios, sample_of, turn
from benchmark.peers.wire import Request
from benchmark.peers.workloads import WORKLOADS, Encode, Workload

W3, W4 = (next(each for each in WORKLOADS if each.name == name) for name in ("W3", "W4"))
NO_CACHE = replace(W3, title="cache against none", measures=("against no cache",))
FREE = Workload("W4", "constraint against none, as many tokens", "tokens/s", W4.make, ("against free text",))


def own_comparisons(
    engine: Measurable, names: list[str], rounds: int, encode: Encode
) -> Iterator[tuple[Ratio, list[Sample]]]:
    if "W3" in names:
        yield from without_cache(engine, rounds, encode)
    if "W4" in names:
        yield from without_constraint(engine, rounds, encode)


def without_cache(engine: Measurable, rounds: int, encode: Encode) -> Iterator[tuple[Ratio, list[Sample]]]:
    """The requests of W3 from cold, with their common prefix computed once and computed by each of them."""

    def run(at: int, cached: bool) -> list[Sample]:
        requests = NO_CACHE.make(random.Random(f"no cache {at}"), encode)
        return timed(
            engine, NO_CACHE, at, requests if cached else alone(requests), "" if cached else "no cache"
        )

    yield from ratios(NO_CACHE, alternate(lambda at: run(at, True), lambda at: run(at, False), rounds))


def without_constraint(
    engine: Measurable, rounds: int, encode: Encode
) -> Iterator[tuple[Ratio, list[Sample]]]:
    """The requests of W4, and the same prompts with no schema and as many tokens out. Neither uses the cache, as the
    second of a pair would find the prompts of the first there."""

    @cache
    def both(at: int) -> tuple[list[Request], list[Request]]:
        constrained = alone(FREE.make(random.Random(f"free text {at}"), encode))
        with turn(engine, f"lengths {at}"):
            _, outputs = engine.run(constrained)
        free = [
            replace(request, schema=None, max_tokens=output.tokens)
            for request, output in zip(constrained, outputs, strict=True)
        ]
        return constrained, free

    def run(at: int, free: bool) -> list[Sample]:
        return timed(engine, FREE, at, both(at)[free], "free" if free else "")

    yield from ratios(FREE, alternate(lambda at: run(at, False), lambda at: run(at, True), rounds))


def timed(
    engine: Measurable, workload: Workload, at: int, requests: list[Request], variant: str
) -> list[Sample]:
    with turn(engine, f"{workload.title} {variant} {at}"):
        (measure,) = workload.measures
        sample = sample_of(engine, workload, measure, engine.name, at, requests)
    return [replace(sample, engine=f"{engine.name}, {variant}") if variant else sample]
