"""Steps of the model as shares of what the device can do, the gaps between them, and memory against the plan."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmark.gpu.driving import Ask, Driver
from benchmark.gpu.models import product_weights
from benchmark.gpu.peaks import Peaks
from benchmark.gpu.report import Report
from benchmark.gpu.stopwatch import Stopwatch
from trellis.runtime.cuda.runner import DeviceRunner
from trellis.runtime.executor.contract import Extend, Logits, Pending, SampleRow
from trellis.runtime.executor.kv_pool import kv_bytes_per_token
from trellis.runtime.messages import SamplingParams

DECODE_BARS = {1: 0.70, 64: 0.60}
GAP_BAR_US = 300.0
MEMORY_BAR = 0.03
GREEDY = SamplingParams(temperature=0.0)


def measure_decode(
    report: Report, runner: DeviceRunner, peaks: Peaks, batches: Sequence[int], context: int
) -> None:
    """Bytes that a decode step must read ÷ its time ÷ the rate of a copy. A step is forward and greedy sampling, launched one
    after the other as with overlap."""
    pool = runner.pool.slots
    for batch in batches:
        length = min(context, pool // batch)
        extends = [_decode(i, length) for i in range(batch)]
        rows = [SampleRow(i, GREEDY, 0, 0) for i in range(batch)]

        def step(extends: list[Extend] = extends, rows: list[SampleRow] = rows) -> None:
            runner.sample_later(runner.forward(extends), rows)

        seconds = Stopwatch(runner.device.where).seconds(step, repeats=20)
        item = runner.pool.keys[0].dtype
        read = product_weights(runner.config) * _weight_bytes(runner)
        read += batch * length * kv_bytes_per_token(runner.config, item)
        share = read / seconds / peaks.copy
        name = f"decode, {batch} requests of {length} tokens: share of a copy"
        note = f"{seconds * 1e3:.2f} ms a step, {batch / seconds:,.0f} tokens/s, {read / seconds / 1e12:.2f} TB/s"
        if batch in DECODE_BARS:
            report.at_least("speed", name, share, DECODE_BARS[batch], "", note)
        else:
            report.figure("speed", name, share, "", note)


def _decode(index: int, length: int) -> Extend:
    slots = np.arange(1 + index * length, 1 + (index + 1) * length, dtype=np.int32)
    return Extend(np.ones(1, np.int32), length - 1, slots, 0)


def _weight_bytes(runner: DeviceRunner) -> int:
    return runner.step.model.dtype.itemsize


def measure_prefill(report: Report, runner: DeviceRunner, peaks: Peaks, lengths: Sequence[int]) -> None:
    """Operations of the products and of causal attention ÷ time ÷ the rate of a large product."""
    c = runner.config
    for length in lengths:
        tokens = np.ones(length, np.int32)
        extend = Extend(tokens, 0, np.arange(1, length + 1, dtype=np.int32), length - 1)
        seconds = Stopwatch(runner.device.where).seconds(lambda e=extend: runner.forward([e]), repeats=5)  # type: ignore[misc]
        layers = product_weights(c) - c.vocab_size * c.hidden_size
        operations = 2 * layers * length + 2 * length**2 * c.query_size * c.num_layers
        share = operations / seconds / peaks.products
        note = f"{length / seconds:,.0f} tokens/s, {operations / seconds / 1e12:.0f} TFLOP/s"
        report.figure("speed", f"prefill of {length}: share of a product", share, "", note)


class Timed:
    """A runner whose steps are marked in the device's stream. Implements ``LaunchingRunner``."""

    def __init__(self, runner: DeviceRunner) -> None:
        self._runner = runner
        self._watch = Stopwatch(runner.device.where)
        self.vocab_size = runner.vocab_size
        self.steps: list[list[Any]] = []
        self.waited = 0
        """Steps that the device had been waiting for when they were begun: that wait is in ``gaps``, but not the time from the
        begin to the first launch."""

    def forward(self, extends: Sequence[Extend]) -> Logits:
        self.waited += bool(self.steps) and self._watch.reached(self.steps[-1][-1])
        self.steps.append([self._watch.mark()])
        return self._runner.forward(extends)

    def sample_later(self, logits: Logits, rows: Sequence[SampleRow]) -> Pending:
        pending = self._runner.sample_later(logits, rows)
        self.steps[-1].append(self._watch.mark())
        return pending

    def gaps(self, skipped: int) -> list[float]:
        """Seconds that the device had nothing to do between two steps, the first ``skipped`` left out."""
        self._watch.wait()
        whole = [step for step in self.steps if len(step) == 2][skipped:]
        return [self._watch.between(a[1], b[0]) for a, b in pairwise(whole)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def measure_gaps(report: Report, driver: Driver, requests: Sequence[int], tokens: int) -> None:
    """Between the end of one step on the device and the begin of the next, in the overlapped loop of the scheduler."""
    runner = driver.runner
    if not isinstance(runner, DeviceRunner):
        raise TypeError(f"gaps are measured with a DeviceRunner, not a {type(runner).__name__}")
    for count in requests:
        timed = Timed(runner)
        driver.runner = timed
        try:
            driver.run([Ask([7 + i] * 32, tokens) for i in range(count)])
        finally:
            driver.runner = runner
        gaps = sorted(1e6 * gap for gap in timed.gaps(skipped=8))
        median, most = statistics.median(gaps), gaps[int(0.9 * len(gaps))]
        note = f"90 % are below {most:.0f} us; {len(gaps)} steps, {timed.waited} of them begun when the device was idle"
        report.at_most("speed", f"gap between steps, {count} requests", median, GAP_BAR_US, "us", note)


def check_memory(report: Report, runner: DeviceRunner, driver: Driver, chunk: int) -> None:
    """What is taken once the largest step has run, against what was planned for it."""
    plan = runner.plan
    if plan is None:
        report.skip("memory", "taken ÷ planned", "the size of the pool was given, so nothing was planned")
        return
    runner.device.give_back()  # what is kept of anything else
    driver.run([Ask([3 + i % 9] * min(chunk, 700), 8) for i in range(16)])
    report.figure("memory", "slots of the pool", runner.pool.slots, "tokens", plan.describe())
    # torch keeps what the step has freed, so this is the most that was taken at one time.
    taken = _taken(runner)
    off = abs(taken / plan.planned - 1)
    note = f"{taken / 2**30:.2f} GiB taken, {plan.planned / 2**30:.2f} GiB planned"
    report.at_most("memory", "difference between taken and planned", off, MEMORY_BAR, "", note)


def _taken(runner: DeviceRunner) -> int:
    """Bytes, with what torch keeps for later."""
    if runner.device.where.type != "cuda":
        return runner.device.used_memory()
    import torch

    free, total = torch.cuda.mem_get_info(runner.device.where)
    return int(total - free)
