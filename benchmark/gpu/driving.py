"""The scheduler over a runner on the device, with switches: what a server does, without a server."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from trellis.fsm import GrammarCompiler, Vocabulary
from trellis.runtime.cuda.runner import DeviceRunner
from trellis.runtime.executor.contract import Runner
from trellis.runtime.messages import Constraint, GenerateCommand, SamplingParams
from trellis.runtime.scheduler import Scheduler, SchedulerConfig


@dataclass(frozen=True)
class Switches:
    """radix: False puts every request into a namespace of its own, so that none finds what another has computed."""

    graphs: bool = True
    overlap: bool = True
    radix: bool = True
    jump_forward: bool = True


ALL_ON = Switches()
ONE_OFF = {name: replace(ALL_ON, **{name: False}) for name in ("graphs", "overlap", "radix", "jump_forward")}


@dataclass(frozen=True)
class Ask:
    """A greedy request. regex: what its text must match; else it goes on for max_new_tokens."""

    token_ids: list[int]
    max_new_tokens: int
    regex: str | None = None


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    finish: str
    cached_tokens: int
    forward_passes: int


def vocabulary(size: int) -> Vocabulary:
    """Bytes, and pairs of small letters, as far as they go; the last id ends a text; the others are no text."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a + b).encode() for a in letters for b in letters][: size - 257]
    spelled = [bytes([byte]) for byte in range(256)] + pairs
    ids = {token: i for i, token in enumerate(spelled)}

    def encode(text: str) -> list[int]:
        data, found, at = text.encode(), [], 0
        while at < len(data):
            length = 2 if data[at : at + 2] in ids else 1
            found.append(ids[data[at : at + length]])
            at += length
        return found

    padded = spelled + [b""] * (size - len(spelled))
    return Vocabulary(padded, size, frozenset({size - 1}), encode, f"pairs-{size}")


class Driver:
    """Runs lists of requests over one runner. chunk: most prompt tokens of a step."""

    def __init__(self, runner: Runner, pool_tokens: int, running: int, chunk: int, context: int) -> None:
        self.runner = runner
        self.vocabulary = vocabulary(runner.vocab_size)
        self._config = SchedulerConfig(
            max_total_tokens=pool_tokens,
            context_length=context,
            max_running_requests=running,
            chunked_prefill_size=chunk,
        )

    def run(self, asks: Sequence[Ask], switches: Switches = ALL_ON) -> tuple[list[Answer], float]:
        """All at once, from an empty cache → the answers, and the seconds that they took. RuntimeError if one failed."""
        grammars = GrammarCompiler(self.vocabulary)
        config = replace(self._config, overlap=switches.overlap)
        scheduler = Scheduler(config, self.runner, self.vocabulary, grammars, rng=random.Random(0))
        found: dict[str, Answer] = {}
        tokens: dict[str, list[int]] = {str(i): [] for i in range(len(asks))}
        try:
            with graphs_as(self.runner, switches.graphs):
                began = time.perf_counter()
                scheduler.add([_command(i, ask, switches) for i, ask in enumerate(asks)])
                while len(found) < len(asks):
                    for output in scheduler.step():
                        tokens[output.rid] += output.token_ids
                        if output.finish is not None:
                            counts = output.counts
                            kind = output.finish.type
                            if kind in ("error", "abort"):
                                raise RuntimeError(f"request {output.rid} ended: {output.finish.message}")
                            found[output.rid] = Answer(
                                tokens[output.rid], kind, counts.cached_tokens, counts.forward_passes
                            )
                seconds = time.perf_counter() - began
        finally:
            grammars.close()
        return [found[str(i)] for i in range(len(asks))], seconds


@contextmanager
def graphs_as(runner: Runner, wanted: bool) -> Iterator[None]:
    """A runner replays its graphs or does without them."""
    if wanted or not isinstance(runner, DeviceRunner):
        yield
        return
    kept, runner.step.graphs = runner.step.graphs, None
    try:
        yield
    finally:
        runner.step.graphs = kept


def _command(index: int, ask: Ask, switches: Switches) -> GenerateCommand:
    free = ask.regex is None
    return GenerateCommand(
        rid=str(index),
        token_ids=ask.token_ids,
        params=SamplingParams(
            max_new_tokens=ask.max_new_tokens, temperature=0.0, ignore_eos=free, seed=index
        ),
        constraint=None if ask.regex is None else Constraint("regex", ask.regex),
        namespace="" if switches.radix else str(index),
        jump_forward=switches.jump_forward,
        stream=False,
    )
