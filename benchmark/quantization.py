"""What quantised weights cost in quality and save in time and memory, beside 16 and 32 bits in one run.

``python -m benchmark.quantization [--model-path PATH] [--formats bfloat16 int8 ...] [--rounds N] [--num-threads N]
[--processor-time]``

Quality: the perplexity of a fixed text (benchmark/quantization.txt), which is cut into pieces of 512 tokens, and the share
of its tokens after which the best next token is the same as in float32. Speed: steps of the same batches, all formats in
turns; a ratio is the time of bfloat16 ÷ the time of the format, in the same round. ``--rounds 0`` measures no time.
``--processor-time`` computes in one thread and counts what the processor spent on it, which other work on the machine
disturbs less than the time on the clock.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmark.profile import WORKLOADS, Workload, batch_of
from trellis.runtime.executor import ModelRunner, build_runner
from trellis.runtime.executor.batch import flatten
from trellis.runtime.executor.contract import Extend
from trellis.runtime.executor.step import NativeStep
from trellis.runtime.models import load_tokenizer, resolve_model_path

TEXT = Path(__file__).parent / "quantization.txt"
PIECE = 512
SLOTS = 7000  # the largest of the workloads
REFERENCE = "float32"
# name → dtype, quantization
FORMATS = {
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
    "file": ("bfloat16", "file"),
}
TIMED = WORKLOADS[:4]


@dataclass(frozen=True)
class Quality:
    """best: the likeliest next token after each token of the text but the last of each piece."""

    perplexity: float
    best: torch.Tensor

    def worse_than(self, other: Quality) -> float:
        return self.perplexity / other.perplexity - 1

    def agreement(self, other: Quality) -> float:
        return (self.best == other.best).float().mean().item()


def quality(runner: ModelRunner, token_ids: Sequence[int]) -> Quality:
    """Every piece is a request of its own."""
    loss, best = 0.0, []
    for at in range(0, len(token_ids) - 1, PIECE):
        piece = np.array(token_ids[at : at + PIECE], np.int32)
        slots = np.arange(1, len(piece) + 1, dtype=np.int32)
        rows = runner.forward([Extend(piece, 0, slots, 0)])
        logits = rows.take(range(len(piece) - 1))
        following = torch.from_numpy(piece[1:].astype(np.int64))
        loss += torch.nn.functional.cross_entropy(logits, following, reduction="sum").item()
        best.append(logits.argmax(-1))
    joined = torch.cat(best)
    return Quality(math.exp(loss / len(joined)), joined)


def native(runner: ModelRunner) -> NativeStep:
    if not isinstance(runner.step, NativeStep):
        raise SystemExit("the native executor cannot be used here; see the warning above")
    return runner.step


def step_seconds(runner: ModelRunner, workload: Workload, clock: Callable[[], float]) -> float:
    """The best of three steps."""
    step, batch = native(runner), flatten(batch_of(workload, runner.vocab_size))
    logits = torch.empty((batch.n_logits, runner.vocab_size))
    took = []
    for _ in range(3):
        began = clock()
        step.decoder.step(batch, step.pointers, logits=logits)
        took.append(clock() - began)
    return min(took)


def show_quality(runners: dict[str, ModelRunner], token_ids: Sequence[int]) -> None:
    results = {name: quality(runner, token_ids) for name, runner in runners.items()}
    reference = results[REFERENCE]
    print(f"{len(token_ids)} tokens of {TEXT.name}")
    print(f"{'format':<10} {'perplexity':>10} {'worse by':>9} {'same best token':>16} {'weights':>10}")
    for name, result in results.items():
        size = native(runners[name]).decoder.nbytes / 1e6
        print(
            f"{name:<10} {result.perplexity:10.3f} {result.worse_than(reference):+9.2%} "
            f"{result.agreement(reference):16.1%} {size:7.0f} MB"
        )


def show_speed(runners: dict[str, ModelRunner], base: str, rounds: int, clock: Callable[[], float]) -> None:
    for workload in TIMED:
        times: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(rounds):
            for name, runner in runners.items():
                times[name].append(step_seconds(runner, workload, clock))
        print(f"\n{workload.name}: milliseconds of a step, best and median of {rounds}; {base} ÷ format")
        for name, seconds in times.items():
            ratios = [b / s for b, s in zip(times[base], seconds, strict=True)]
            print(
                f"{name:<10} {min(seconds) * 1e3:8.2f} {statistics.median(seconds) * 1e3:8.2f}   "
                f"best {min(times[base]) / min(seconds):5.2f}x, median of pairs {statistics.median(ratios):5.2f}x "
                f"({min(ratios):.2f} - {max(ratios):.2f})"
            )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model-path", default="smollm2-135m")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--num-threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args(argv)
    threads = 1 if args.processor_time else args.num_threads
    tokenizer = load_tokenizer(resolve_model_path(args.model_path))
    names = [name for name in FORMATS if name in args.formats or name == REFERENCE]
    runners = {}
    for name in names:
        dtype, quantization = FORMATS[name]
        runners[name] = build_runner(
            args.model_path, dtype, "auto", SLOTS, num_threads=threads, quantization=quantization
        )
    show_quality(runners, tokenizer.encode(TEXT.read_text(encoding="utf-8")))
    if args.rounds:
        timed = {name: runner for name, runner in runners.items() if name in args.formats}
        base = "bfloat16" if "bfloat16" in timed else next(iter(timed))
        show_speed(timed, base, args.rounds, time.thread_time if args.processor_time else time.perf_counter)


if __name__ == "__main__":
    main()
