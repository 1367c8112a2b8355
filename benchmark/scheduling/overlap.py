"""What planning a step while the one before is computed saves: ``python -m benchmark.scheduling.overlap``.

The model is a device that takes a fixed time for a step and needs no processor meanwhile, as a GPU does; the
scheduler is the real one. Both ways take turns, and the figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

from benchmark.scheduling.model import PROFILES, VOCABULARY_SIZE, Clock, TraceRunner, vocabulary
from benchmark.scheduling.simulation import NoGrammars
from trellis.runtime.executor.contract import Extend, Logits
from trellis.runtime.messages import GenerateCommand, SamplingParams
from trellis.runtime.scheduler import Scheduler, SchedulerConfig

PROMPT_TOKENS = 64


class Device(TraceRunner):
    """Takes ``seconds`` for every step, in which other threads run."""

    seconds = 0.0

    def forward(self, extends: Sequence[Extend]) -> Logits:
        logits = super().forward(extends)
        time.sleep(self.seconds)
        return logits


def step_milliseconds(requests: int, steps: int, device_ms: float, overlap: bool) -> float:
    """Wall time a step, with so many requests that each decode one token."""
    rng = random.Random(0)
    length = steps + 64
    outputs = [[1 + rng.randrange(VOCABULARY_SIZE - 1) for _ in range(length)] for _ in range(requests)]
    runner = Device(outputs, PROFILES["gpu"], Clock())
    config = SchedulerConfig(
        max_total_tokens=4 * requests * (PROMPT_TOKENS + length),
        context_length=PROMPT_TOKENS + length + 1,
        max_running_requests=requests,
        chunked_prefill_size=max(1, requests * PROMPT_TOKENS),
        overlap=overlap,
    )
    scheduler = Scheduler(config, runner, vocabulary(), NoGrammars(), rng=rng)
    scheduler.add(
        [
            GenerateCommand(
                rid=str(index),
                token_ids=[1 + rng.randrange(VOCABULARY_SIZE - 1) for _ in range(PROMPT_TOKENS)],
                params=SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True, seed=index),
            )
            for index in range(requests)
        ]
    )
    while len(scheduler.roster.decoding) < requests:
        scheduler.step()
    runner.seconds = device_ms / 1e3
    scheduler.step()
    began = time.perf_counter()
    for _ in range(steps):
        scheduler.step()
    return (time.perf_counter() - began) * 1e3 / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[32, 128, 256])
    parser.add_argument("--device-ms", type=float, default=8.0, help="time of a step on the device")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"ms a step, of which the device takes {args.device_ms:g}; medians of {args.rounds} rounds")
    print(f"{'running':>8}{'one by one':>12}{'overlapped':>12}{'ratio':>8}")
    for requests in args.requests:
        rounds = [
            [step_milliseconds(requests, args.steps, args.device_ms, overlap) for overlap in (False, True)]
            for _ in range(args.rounds)
        ]
        plain, ahead = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(one / other for one, other in rounds)
        print(f"{requests:>8}{plain:>12.2f}{ahead:>12.2f}{ratio:>7.2f}×")


if __name__ == "__main__":
    main()
