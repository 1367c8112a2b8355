"""A step as a server takes it: what the model, sampling, masks, scheduling and the ways between processes take.

The real scheduler drives the real model; its outputs go over the sockets of a server, to a detokenizer and from there on,
all in this thread, one after the other. Half of the requests are constrained. Part of ``python -m benchmark.profile``.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmark.scheduling.stopwatch import Parts, Stopwatch, watching
from trellis.fsm import GrammarCompiler
from trellis.runtime.executor import ModelRunner
from trellis.runtime.manager.detokenizer import Detokenizer
from trellis.runtime.manager.transport import SocketDirectory, ZmqReceiver, ZmqSender
from trellis.runtime.messages import Constraint, GenerateCommand, SamplingParams, TextOutput, TokenOutput
from trellis.runtime.models import Tokenizer
from trellis.runtime.scheduler import Scheduler, SchedulerConfig
from trellis.runtime.scheduler import masks as masks_module
from trellis.runtime.scheduler.masks import MaskFilling

PROMPT, PREFILL = 200, 512  # tokens
MASKED = Constraint("regex", r"(?:[a-z]+[ ,.])+")  # leaves much open, so there is a mask in every step
SECONDS_TO_START = 120.0

TIMED: Parts = (
    ("model", ModelRunner, "forward"),
    ("sampling", ModelRunner, "sample"),
    ("masks", MaskFilling, "wait"),
    ("filling", masks_module, "_fill"),
)
COLUMNS = ("model", "sampling", "masks", "scheduling", "ipc", "detokenizing")

Row = dict[str, float]


class Wire:
    """The sockets from the scheduler to the detokenizer and from there to the HTTP process, both ends in our hands."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._directory = SocketDirectory()
        tokens, texts = (self._directory.address(name) for name in ("tokens", "texts"))
        self._tokens: ZmqReceiver[TokenOutput] = ZmqReceiver(tokens, TokenOutput)
        self._texts: ZmqReceiver[TextOutput] = ZmqReceiver(texts, TextOutput)
        self._to_tokens: ZmqSender[TokenOutput] = ZmqSender(tokens)
        self._to_texts: ZmqSender[TextOutput] = ZmqSender(texts)
        self._detokenizer = Detokenizer(tokenizer)

    def carry(self, outputs: Sequence[TokenOutput]) -> tuple[float, float]:
        """Seconds on the way (encoded, sent, received, decoded, twice), and in the detokenizer."""
        if not outputs:
            return 0.0, 0.0
        began = time.perf_counter()
        self._to_tokens.send(outputs, timeout=1.0)
        arrived = self._tokens.receive(1.0)
        read = time.perf_counter()
        texts = self._detokenizer.process(arrived)
        written = time.perf_counter()
        if texts:
            self._to_texts.send(texts, timeout=1.0)
            self._texts.receive(1.0)
        return time.perf_counter() - written + read - began, written - read

    def close(self) -> None:
        for end in (self._tokens, self._texts, self._to_tokens, self._to_texts):
            end.close()
        self._directory.remove()


@contextmanager
def scheduler_of(runner: ModelRunner, tokenizer: Tokenizer, slots: int) -> Iterator[Scheduler]:
    grammars = GrammarCompiler(tokenizer.vocabulary())
    config = SchedulerConfig(max_total_tokens=slots, context_length=slots)
    try:
        yield Scheduler(config, runner, tokenizer.vocabulary(), grammars, rng=random.Random(0))
    finally:
        grammars.close()


def measure_decode(runner: ModelRunner, tokenizer: Tokenizer, slots: int, requests: int, rounds: int) -> Row:
    """Medians, in seconds a step, by ``COLUMNS``; and ``filling``, the time of masks, most of it beside the model."""
    with scheduler_of(runner, tokenizer, slots) as scheduler:
        rng = random.Random(requests)
        length = rounds + 64
        scheduler.add([_command(rng, i, PROMPT, length, masked=i % 2 == 1) for i in range(requests)])
        until = time.monotonic() + SECONDS_TO_START
        while not _all_decode(scheduler, requests):
            scheduler.step()
            if time.monotonic() > until:
                raise RuntimeError(
                    f"{len(scheduler.roster.running)} of {requests} requests run together, not all"
                )
        return _steps(scheduler, tokenizer, rounds, lambda _: None)


def measure_prefill(runner: ModelRunner, tokenizer: Tokenizer, slots: int, rounds: int) -> Row:
    """As ``measure_decode``, of steps that compute a prompt of ``PREFILL`` tokens and choose one token."""
    rng = random.Random(0)
    with scheduler_of(runner, tokenizer, slots) as scheduler:

        def ask(index: int) -> None:
            scheduler.add([_command(rng, index, PREFILL, 1, masked=False)])

        return _steps(scheduler, tokenizer, rounds, ask)


def _all_decode(scheduler: Scheduler, requests: int) -> bool:
    running = scheduler.roster.running
    return len(running) == requests and not any(request.prefilling for request in running)


def _steps(scheduler: Scheduler, tokenizer: Tokenizer, rounds: int, before: Callable[[int], None]) -> Row:
    samples: dict[str, list[float]] = {name: [] for name in (*COLUMNS, "filling")}
    wire = Wire(tokenizer)
    try:
        with watching(TIMED, time.perf_counter) as watch:
            for index in range(rounds):
                before(index)
                for name, value in _one(scheduler, wire, watch).items():
                    samples[name].append(value)
    finally:
        wire.close()
    return {name: statistics.median(values) for name, values in samples.items()}


def _one(scheduler: Scheduler, wire: Wire, watch: Stopwatch) -> Row:
    watch.reset()
    began = time.perf_counter()
    outputs = scheduler.step()
    row = dict(watch.spent)
    row["scheduling"] = time.perf_counter() - began - row["model"] - row["sampling"] - row["masks"]
    row["ipc"], row["detokenizing"] = wire.carry(outputs)
    return row


def _command(rng: random.Random, index: int, prompt: int, length: int, masked: bool) -> GenerateCommand:
    return GenerateCommand(
        rid=str(index),
        token_ids=[rng.randrange(100, 40_000) for _ in range(prompt)],
        params=SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True),
        constraint=MASKED if masked else None,
        stream=True,
    )


def print_whole_steps(runner: ModelRunner, tokenizer: Tokenizer, slots: int, rounds: int) -> None:
    """The table."""
    print("\nA step in a server, ms (medians); of decodes every second request is constrained")
    print(f"{'':22}" + "".join(f"{name:>14}" for name in (*COLUMNS, "not the model")))
    rows = {f"decode, {n}": measure_decode(runner, tokenizer, slots, n, rounds) for n in (1, 8, 32)}
    rows[f"prefill of {PREFILL}"] = measure_prefill(runner, tokenizer, slots, rounds)
    for name, row in rows.items():
        whole = sum(row[column] for column in COLUMNS)
        cells = "".join(f"{row[column] * 1e3:14.3f}" for column in COLUMNS)
        print(f"{name:22}{cells}{1 - row['model'] / whole:14.1%}")
    filling = ", ".join(f"{row['filling'] * 1e3:.3f} ({name})" for name, row in rows.items())
    print(f"masks: what the step waits for them. Filled beside the model in, ms: {filling}")
