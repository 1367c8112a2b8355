"""Two engines in alternation, pair by pair, and the ratios of each pair."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from benchmark.peers.process import EngineFailed
from benchmark.peers.wire import Output, Request
from benchmark.peers.workloads import Encode, Workload, random_tokens, valid_answers

TOUCH_IN, TOUCH_OUT = 16, 8  # tokens of the request that wakes an engine before its turn is timed


class Measurable(Protocol):
    """An EngineProcess, or what stands in for one in a test."""

    name: str

    def awake(self) -> AbstractContextManager[None]: ...

    def run(self, requests: Sequence[Request]) -> tuple[float, list[Output]]: ...


@dataclass(frozen=True)
class Sample:
    """One timed run. value: in the workload's unit. valid: answers that do what their schema says, of so many requests."""

    workload: str
    engine: str
    against: str
    round: int
    seconds: float
    value: float
    prompt_tokens: int
    output_tokens: int
    output_characters: int
    valid: int
    requests: int


@dataclass(frozen=True)
class Ratio:
    """Of one measure against one peer: medians in the workload's unit, and how many times as good Trellis is.

    ratio: median of the pairs' ratios; low, high: their extremes. valid: the fewest good answers of a run, of so many
    requests; Trellis, peer.
    """

    workload: str
    unit: str
    trellis: str
    peer: str
    ours: float
    theirs: float
    ratio: float
    low: float
    high: float
    rounds: int
    valid: tuple[int, int]
    requests: int


Take = Callable[[int], list[Sample]]


def alternate(ours: Take, theirs: Take, rounds: int) -> list[tuple[list[Sample], list[Sample]]]:
    """One round to warm up that is not kept, then pairs; who goes first changes from pair to pair."""
    pairs = []
    for at in range(-1, rounds):
        if at % 2:
            their, our = theirs(at), ours(at)
        else:
            our, their = ours(at), theirs(at)
        if at >= 0:
            pairs.append((our, their))
    return pairs


def take(
    engine: Measurable, workload: Workload, against: str, seed: str, encode: Encode, at: int, first: int
) -> list[Sample]:
    """One turn of an engine: a sample for each of the workload's measures. EngineFailed for a wrong answer.

    The requests depend on the workload, the seed and the round, so both engines of a pair get the same.
    """
    requests = workload.make(random.Random(f"{workload.name} {seed} {at}"), encode)
    with turn(engine, f"{workload.name} {seed} {at}"):
        return [
            sample_of(engine, workload, measure, against, at, requests, first)
            for measure in workload.measures
        ]


@contextmanager
def turn(engine: Measurable, seed: str) -> Iterator[None]:
    """The engine is awake, and has answered something else, so that its threads and code are warm."""
    with engine.awake():
        engine.run([Request(random_tokens(random.Random(f"touch {seed}"), TOUCH_IN), TOUCH_OUT)])
        yield


def sample_of(
    engine: Measurable,
    workload: Workload,
    measure: str,
    against: str,
    at: int,
    requests: list[Request],
    first: int = 0,
) -> Sample:
    """first: so many requests are sent and answered before the others."""
    seconds = 0.0
    outputs: list[Output] = []
    for part in (requests[:first], requests[first:]):
        if part:
            took, answers = engine.run(part)
            seconds, outputs = seconds + took, outputs + answers
    try:
        valid = valid_answers(requests, outputs)
    except ValueError as error:
        raise EngineFailed(f"{engine.name}, {workload.name}: {error}") from error
    return Sample(
        workload=f"{workload.name} {measure}".strip(),
        engine=engine.name,
        against=against,
        round=at,
        seconds=seconds,
        value=workload.value(seconds, requests, outputs),
        prompt_tokens=sum(len(each.prompt) for each in requests),
        output_tokens=sum(each.tokens for each in outputs),
        output_characters=sum(len(each.text) for each in outputs),
        valid=valid,
        requests=len(requests),
    )


def ratios(
    workload: Workload, pairs: Sequence[tuple[list[Sample], list[Sample]]]
) -> Iterator[tuple[Ratio, list[Sample]]]:
    """A ratio for each of the workload's measures, with the samples that it comes from."""
    for index in range(len(workload.measures)):
        our = [mine[index] for mine, _ in pairs]
        their = [others[index] for _, others in pairs]
        yield ratio_of(workload, our, their), [each for pair in zip(our, their, strict=True) for each in pair]


def ratio_of(workload: Workload, our: Sequence[Sample], their: Sequence[Sample]) -> Ratio:
    quotients = [
        a.value / b.value if workload.higher_is_better else b.value / a.value
        for a, b in zip(our, their, strict=True)
    ]
    return Ratio(
        workload=our[0].workload,
        unit=workload.unit,
        trellis=our[0].engine,
        peer=their[0].engine,
        ours=statistics.median(each.value for each in our),
        theirs=statistics.median(each.value for each in their),
        ratio=statistics.median(quotients),
        low=min(quotients),
        high=max(quotients),
        rounds=len(quotients),
        valid=(min(each.valid for each in our), min(each.valid for each in their)),
        requests=our[0].requests,
    )


def alone(requests: Sequence[Request]) -> list[Request]:
    """The same, each with no use of the cache."""
    return [replace(each, shared=False) for each in requests]
