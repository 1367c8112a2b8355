"""A model of step time in place of the model, and the virtual clock that it moves.

The runner gives each request the tokens that its trace names, so the calls of a program go on from each other
as they would with a model, and every run is the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from trellis.fsm.contract import Vocabulary
from trellis.runtime.executor.contract import Extend, Logits, Sampled, SampleRow
from trellis.runtime.messages import TopLogprobs

EOS = 0
VOCABULARY_SIZE = 1 << 30
"""Ids only name tokens here; there are so many that every piece of text can have tokens of its own."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a forward pass: base + token·(tokens computed) + context·(K/V rows read) + pair·(attended pairs).

    K/V rows read: the sum over the extends of their sequence lengths. Attended pairs: the sum over the computed
    tokens of the positions before them.
    """

    name: str
    base: float
    token: float
    context: float
    pair: float

    def of(self, extends: Sequence[Extend]) -> float:
        tokens = context = pairs = 0
        for extend in extends:
            n = len(extend.token_ids)
            tokens += n
            context += extend.start + n
            pairs += n * extend.start + n * (n + 1) // 2
        return self.base + self.token * tokens + self.context * context + self.pair * pairs


PROFILES = {
    # A dense model of 8·10⁹ parameters in bfloat16 on a card with 2·10¹² bytes/s and 150·10¹² useful flop/s: reading
    # the weights (16 GB), 16·10⁹ flop a token, 131 kB of K/V a position (32 layers, 8 heads of 128), 0.52·10⁶ flop a
    # pair. Arithmetic, not measured.
    "gpu": StepTime("gpu", base=8e-3, token=1.07e-4, context=6.5e-8, pair=3.5e-9),
    # SmolLM2-135M with the torch executor on one core of a server: CPU seconds of ``--calibrate``, which anyone can
    # repeat; the fit is within 15 % of eleven of the twelve shapes it was made from.
    "cpu": StepTime("cpu", base=4.6e-2, token=1.39e-3, context=9.1e-6, pair=1.2e-6),
}


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TraceRunner:
    """Implements ``Runner``: a forward moves the clock; the seed of a request is the index of its call.

    outputs: tokens of each call. busy: CPU seconds of the thread spent in here, which are not the scheduler's.
    """

    def __init__(self, outputs: Sequence[Sequence[int]], step_time: StepTime, clock: Clock) -> None:
        self.vocab_size = VOCABULARY_SIZE
        self.busy = 0.0
        self.computed_tokens = 0
        self.forwards = 0
        self._outputs = outputs
        self._step_time = step_time
        self._clock = clock

    def forward(self, extends: Sequence[Extend]) -> Logits:
        began = time.thread_time()
        self._clock.now += self._step_time.of(extends)
        self.computed_tokens += sum(len(extend.token_ids) for extend in extends)
        self.forwards += 1
        rows = range(sum(extend.n_logits for extend in extends))  # nobody looks into them
        self.busy += time.thread_time() - began
        return rows

    def sample(self, logits: Logits, rows: Sequence[SampleRow]) -> Sampled:  # noqa: ARG002  # as in the contract
        began = time.thread_time()
        tokens = [self._outputs[row.seed][row.step] for row in rows]
        sampled = Sampled(tokens, [None] * len(rows), [None] * len(rows))
        self.busy += time.thread_time() - began
        return sampled

    def score(  # the arguments are the contract's
        self,
        logits: Logits,  # noqa: ARG002
        rows: Sequence[int],
        token_ids: Sequence[int],  # noqa: ARG002
        top_logprobs_num: int,  # noqa: ARG002
    ) -> tuple[list[float], list[TopLogprobs]]:
        return [0.0] * len(rows), [[] for _ in rows]


def vocabulary() -> Vocabulary:
    """Tokens without text; only id 0 ends one, and no trace has it."""
    return Vocabulary(
        token_bytes=(),
        size=VOCABULARY_SIZE,
        eos_token_ids=frozenset([EOS]),
        encode=lambda _: [],
        fingerprint="names",
    )
