"""What a step costs when nothing comes or goes: many requests, each decoding one token a step."""

from __future__ import annotations

import random
import statistics

from benchmark.scheduling.model import PROFILES, VOCABULARY_SIZE, Clock, TraceRunner, vocabulary
from benchmark.scheduling.simulation import NoGrammars
from benchmark.scheduling.stopwatch import COLUMNS, timed_step, watching
from trellis.runtime.messages import GenerateCommand, SamplingParams
from trellis.runtime.scheduler import Scheduler, SchedulerConfig

PROMPT_TOKENS = 64


def steady_microseconds(requests: int, steps: int, stream: bool, rounds: int = 3) -> dict[str, float]:
    """Microseconds of scheduler a running request and step, by part: medians over all steps of all rounds."""
    samples: dict[str, list[float]] = {column: [] for column in COLUMNS}
    for _ in range(rounds):
        for column, values in _one_round(requests, steps, stream).items():
            samples[column] += values
    return {column: statistics.median(values) * 1e6 / requests for column, values in samples.items()}


def _one_round(requests: int, steps: int, stream: bool) -> dict[str, list[float]]:
    rng = random.Random(0)
    length = steps + 64
    outputs = [[1 + rng.randrange(VOCABULARY_SIZE - 1) for _ in range(length)] for _ in range(requests)]
    clock = Clock()
    runner = TraceRunner(outputs, PROFILES["gpu"], clock)
    config = SchedulerConfig(
        max_total_tokens=4 * requests * (PROMPT_TOKENS + length),  # nothing waits for memory
        context_length=PROMPT_TOKENS + length + 1,
        max_running_requests=requests,
        chunked_prefill_size=max(1, requests * PROMPT_TOKENS),
    )
    scheduler = Scheduler(config, runner, vocabulary(), NoGrammars(), clock=clock, rng=rng)
    scheduler.add([_command(rng, index, length, stream) for index in range(requests)])
    for _ in range(length // 2):
        running = scheduler.roster.running
        if len(running) == requests and not any(request.prefilling for request in running):
            break
        scheduler.step()
    else:
        raise RuntimeError(
            f"{len(scheduler.roster.running)} of {requests} requests are decoding together, not all"
        )
    taken: dict[str, list[float]] = {column: [] for column in COLUMNS}
    with watching() as watch:
        for _ in range(steps):
            for column, seconds in timed_step(scheduler, runner, watch)[1].items():
                taken[column].append(seconds)
    return taken


def _command(rng: random.Random, index: int, length: int, stream: bool) -> GenerateCommand:
    return GenerateCommand(
        rid=str(index),
        token_ids=[1 + rng.randrange(VOCABULARY_SIZE - 1) for _ in range(PROMPT_TOKENS)],
        params=SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True, seed=index),
        stream=stream,
    )


def print_steady(requests: int, steps: int) -> None:
    """The table of ``--steady``."""
    print(
        f"{requests} running requests, each one token a step; µs of scheduler a running request and step (medians)"
    )
    print(f"{'':12}" + "  ".join(f"{column:>12}" for column in COLUMNS))
    for name, stream in (("streamed", True), ("not streamed", False)):
        cost = steady_microseconds(requests, steps, stream)
        print(f"{name:12}" + "  ".join(f"{cost[column]:>12.2f}" for column in COLUMNS))
