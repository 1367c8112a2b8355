"""The same greedy text whatever is switched on or off, and what each switch is worth."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import numpy as np
import torch

from benchmark.gpu.driving import ALL_ON, ONE_OFF, Answer, Ask, Driver, Switches
from benchmark.gpu.report import Report
from trellis.runtime.executor.contract import Extend
from trellis.runtime.executor.model_runner import ModelRunner

SHEET = (
    r'\{\n    "name": "[a-z]{1,8}",\n    "house": "(red|green|blue)",\n    "length": [0-9]{1,2}\.[0-9],\n'
    r'    "alive": "(yes|no)",\n    "occupation": "(student|teacher|order of the phoenix)"\n\}'
)
# Logits of a dtype that are closer than this may change places with the order of additions.
TIES = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def equality_asks(vocab: int, small: bool) -> list[Ask]:
    """Requests with a common prefix, alone ones, chunks, and constrained ones."""
    rng = random.Random(1)
    count, prefix, new = (6, 40, 12) if small else (24, 300, 48)

    def words(n: int) -> list[int]:
        return [rng.randrange(1, min(vocab - 1, 900)) for _ in range(n)]

    common = words(prefix)
    asks = []
    for i in range(count):
        start = common if i % 3 else []
        regex = SHEET if i % 2 else None
        asks.append(Ask(start + words(5 + 11 * i % 60), 120 if regex else new, regex))
    return asks


def check_texts(report: Report, driver: Driver, reference: ModelRunner, small: bool, backend: str) -> None:
    """reference: the same model with the attention of torch, kernel by kernel."""
    section, asks = "texts", equality_asks(driver.runner.vocab_size, small)
    base, _ = driver.run(asks)
    plain = Switches(graphs=False, overlap=False, radix=False, jump_forward=False)
    others = {f"without {name.replace('_', '-')}": switches for name, switches in ONE_OFF.items()}
    for name, switches in {**others, "with all of them off": plain}.items():
        answers, _ = driver.run(asks, switches)
        _compare(report, section, f"{backend}: all on, and {name}", asks, base, answers, reference)
    own = Driver(reference, driver._config.max_total_tokens, 64, 512, driver._config.context_length)
    answers, _ = own.run(asks, plain)
    _compare(report, section, f"{backend}: all on, and the torch reference", asks, base, answers, reference)
    cached = sum(answer.cached_tokens for answer in base)
    report.right(section, f"{backend}: prefixes are found", cached > 0, f"{cached} prompt tokens were cached")


def _compare(
    report: Report,
    section: str,
    name: str,
    asks: Sequence[Ask],
    ours: Sequence[Answer],
    theirs: Sequence[Answer],
    reference: ModelRunner,
) -> None:
    """Equal, or different from a place on where the reference finds the two tokens as good as equal."""
    ties = wrong = 0
    tie = TIES[reference.pool.keys[0].dtype]
    for ask, one, other in zip(asks, ours, theirs, strict=True):
        if one.token_ids == other.token_ids:
            continue
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), None)
        if (
            at is not None
            and _gap(reference, ask.token_ids + one.token_ids[:at], one.token_ids[at], other.token_ids[at])
            < tie
        ):
            ties += 1
        else:
            wrong += 1
    note = f"{len(asks) - ties - wrong} of {len(asks)} alike" + (f", {ties} ties" if ties else "")
    report.right(section, name, wrong == 0, note)


def _gap(reference: ModelRunner, tokens: list[int], one: int, other: int) -> float:
    """Between the logits of two tokens after these."""
    count = len(tokens)
    extend = Extend(np.array(tokens, np.int32), 0, np.arange(1, count + 1, dtype=np.int32), count - 1)
    values, _ = reference.score(reference.forward([extend]), [0], [one], 0)
    others, _ = reference.score(reference.forward([extend]), [0], [other], 0)
    return abs(values[0] - others[0])


def ablation_asks(name: str, vocab: int, small: bool) -> list[Ask]:
    """A load on which the switch matters."""
    rng = random.Random(2)

    def words(n: int) -> list[int]:
        return [rng.randrange(1, min(vocab - 1, 900)) for _ in range(n)]

    if name == "radix":
        common = words(60 if small else 1000)
        return [Ask(common + words(40), 4 if small else 16) for _ in range(4 if small else 32)]
    if name == "jump_forward":
        return [Ask(words(40), 120, SHEET) for _ in range(2 if small else 8)]
    count = {"graphs": 8, "overlap": 64}[name]
    return [Ask(words(32), 4 if small else 128) for _ in range(2 if small else count)]


def measure_ablations(report: Report, driver: Driver, rounds: int, small: bool) -> None:
    """Seconds without ÷ seconds with, medians of pairs that take turns."""
    for name, off in ONE_OFF.items():
        asks = ablation_asks(name, driver.runner.vocab_size, small)
        driver.run(asks, ALL_ON)
        driver.run(asks, off)
        pairs = []
        for i in range(rounds):
            order = (off, ALL_ON) if i % 2 else (ALL_ON, off)
            times = {switches: driver.run(asks, switches)[1] for switches in order}
            pairs.append(times[off] / times[ALL_ON])
        note = f"{len(asks)} requests, {min(pairs):.2f} - {max(pairs):.2f} in {rounds} rounds"
        label = name.replace("_", "-")
        report.figure("ablations", f"time without ÷ with {label}", statistics.median(pairs), "x", note)
