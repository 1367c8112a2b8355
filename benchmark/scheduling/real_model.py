"""What needs the real model: the share of a run that the scheduler and its tree take, and the model of step time."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import torch

from benchmark.scheduling.model import StepTime
from benchmark.scheduling.simulation import NoGrammars
from benchmark.scheduling.stopwatch import PARTS, TREE, watching
from trellis.runtime.executor import ModelRunner, build_runner
from trellis.runtime.executor.contract import Extend
from trellis.runtime.messages import GenerateCommand, SamplingParams
from trellis.runtime.models import load_tokenizer, resolve_model_path
from trellis.runtime.scheduler import Scheduler, SchedulerConfig

MODEL = "smollm2-135m"
SLOTS = 16384

SHAPES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((1, 10),),
    ((1, 1000),),
    ((1, 500),) * 8,
    ((1, 1500),) * 8,
    ((1, 100),) * 16,
    ((1, 500),) * 16,
    ((1, 300),) * 32,
    ((64, 0),),
    ((256, 0),),
    ((512, 0),),
    ((256, 1000),),
    ((128, 1500),),
)
"""Batches to fit step time to: (new tokens, tokens before them) of each extend."""


def zero_reuse(requests: int, prompt_tokens: int, output_tokens: int) -> dict[str, float]:
    """Shares of the run time, all prompts distinct: of the radix tree, and of planning and commit together (the tree is a
    part of these). Also its seconds and steps."""
    runner = build_runner(MODEL, num_slots=SLOTS)
    vocabulary = load_tokenizer(resolve_model_path(MODEL)).vocabulary()
    config = SchedulerConfig(max_total_tokens=SLOTS, context_length=SLOTS)
    scheduler = Scheduler(config, runner, vocabulary, NoGrammars(), rng=random.Random(0))
    rng = random.Random(0)
    scheduler.add([_distinct(rng, index, prompt_tokens, output_tokens) for index in range(requests)])
    with watching((*PARTS, *TREE), time.perf_counter) as watch:
        began = time.perf_counter()
        while scheduler.has_work():
            scheduler.step()
        total = time.perf_counter() - began
    return {
        "tree": watch.spent["tree"] / total,
        "planning and commit": (watch.spent["planning"] + watch.spent["commit"]) / total,
        "seconds": total,
        "steps": scheduler.counters.forward_passes,
    }


def _distinct(rng: random.Random, index: int, prompt_tokens: int, output_tokens: int) -> GenerateCommand:
    return GenerateCommand(
        rid=str(index),
        token_ids=[100 + index, *(rng.randrange(100, 40_000) for _ in range(prompt_tokens - 1))],
        params=SamplingParams(max_new_tokens=output_tokens, temperature=0.0, ignore_eos=True),
    )


def print_zero_reuse(requests: int, prompt_tokens: int = 128, output_tokens: int = 32) -> None:
    shares = zero_reuse(requests, prompt_tokens, output_tokens)
    print(
        f"{requests} requests with distinct prompts of {prompt_tokens} tokens, {output_tokens} out, on the real model: "
        f"{shares['seconds']:.1f} s, {shares['steps']:.0f} steps\n"
        f"radix tree {shares['tree']:.3%} of the run time, planning and commit {shares['planning and commit']:.2%}"
    )


def calibrate(repeats: int = 2) -> tuple[StepTime, list[float]]:
    """Step time of the real model on one thread, in CPU seconds (other work on the machine hardly counts then).

    Least squares of the relative error over ``SHAPES``. Returns the fit, and fit ÷ measured by shape.
    """
    torch.set_num_threads(1)
    runner = build_runner(MODEL, num_slots=SLOTS, num_threads=1)
    rng = np.random.default_rng(0)
    batches = [_batch(rng, shape) for shape in SHAPES]
    runner.forward(batches[0])
    taken = np.array([min(_cpu_seconds(runner, batch) for _ in range(repeats)) for batch in batches])
    units = [StepTime("unit", *row) for row in np.eye(4).tolist()]
    terms = np.array([[unit.of(batch) for unit in units] for batch in batches])
    fit = np.linalg.lstsq(terms / taken[:, None], np.ones(len(taken)), rcond=None)[0]
    return StepTime("cpu", *fit.tolist()), (terms @ fit / taken).tolist()


def _batch(rng: np.random.Generator, shape: Sequence[tuple[int, int]]) -> list[Extend]:
    extends, slot = [], 1
    for n, start in shape:
        slots = np.arange(slot, slot + start + n, dtype=np.int32)
        extends.append(Extend(rng.integers(100, 40_000, n).astype(np.int32), start, slots, n - 1))
        slot += start + n
    return extends


def _cpu_seconds(runner: ModelRunner, batch: list[Extend]) -> float:
    began = time.process_time()
    runner.forward(batch)
    return time.process_time() - began


def print_calibration() -> None:
    fit, ratios = calibrate()
    print(fit)
    print("fit ÷ measured by shape:", " ".join(f"{ratio:.2f}" for ratio in ratios))
