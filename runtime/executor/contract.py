"""What the scheduler asks of a model runner: plain numpy in, sampled ids out.

The scheduler never sees a tensor, and a test can drive it with a runner that has no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from trellis.runtime.messages import SamplingParams, TopLogprobs

IntArray = npt.NDArray[np.int32]

# How a step may be computed (see ``runtime/executor/step.py``).
EXECUTORS = ("auto", "native", "torch")

# How the native step keeps weights (see ``runtime/native/quantized.py``).
QUANTIZATIONS = ("none", "int8", "int4", "file")

NO_TOKEN = -1  # what is "sampled" from logits that have no finite best
NO_PLACE = -1  # of an extend whose tokens are all known


@dataclass(slots=True)  # made for every request in every step: frozen would cost four times as much
class Extend:
    """New tokens of one request: a prefill chunk, one decode token, or a token and its forced run.

    token_ids: int32 [n], n >= 1; their positions are start .. start+n-1.
    slots: int32 [start + n]; where the K/V of every token of the sequence so far lives. The last n are
        written by this forward, layer by layer before attention reads; the others may be written by another
        extend of the same batch (same-step sharing).
    logits_from: index into token_ids of the first token whose logits are wanted; n for none. Rows of the
        result stand in the order of the extends, then of the tokens.
    follows: where the runner keeps the token that the step before samples for this request: it is the first token of this
        extend, whatever token_ids says. Only for a ``LaunchingRunner``, which says what places there are.
    """

    token_ids: IntArray
    start: int
    slots: IntArray
    logits_from: int
    follows: int = NO_PLACE

    @property
    def n_logits(self) -> int:
        return len(self.token_ids) - self.logits_from


@dataclass(slots=True)  # kept from step to step
class SampleRow:
    """One token to sample.

    row: index of the logits row. seed, step: key and counter of the random number, so that a request's text
        does not depend on its batch; step is the number of output tokens so far.
    mask: int32 [mask_words], one bit a token; None allows everything.
    forbidden: token ids that may not come (EOS and stop ids before min_new_tokens).
    history: int32, prompt and output tokens (for repetition_penalty); output_start: where the output begins
        in it (frequency and presence penalties count output only). None when no penalty is set.
    top_logprobs_num: how many alternatives to report; want_logprob: report the sampled token's.
    """

    row: int
    params: SamplingParams
    seed: int
    step: int
    mask: IntArray | None = None
    forbidden: Sequence[int] = ()
    history: IntArray | None = None
    output_start: int = 0
    want_logprob: bool = False
    top_logprobs_num: int = 0


@dataclass(frozen=True)
class Sampled:
    """token_ids: one a SampleRow, or ``NO_TOKEN``. logprobs, top: aligned; entries are None where not asked for."""

    token_ids: list[int]
    logprobs: list[float | None]
    top: list[TopLogprobs | None]


class Logits(Protocol):
    """Rows that stay on the device; only the runner that made them can read them."""

    def __len__(self) -> int: ...


class Runner(Protocol):
    """The model, as the scheduler sees it."""

    vocab_size: int

    def forward(self, extends: Sequence[Extend]) -> Logits:
        """Compute all extends as one ragged batch. Raises on failure (out of memory, kernel error)."""

    def sample(self, logits: Logits, rows: Sequence[SampleRow]) -> Sampled:
        """Mask, penalties, temperature, top-k, top-p, min-p, draw: in this order, vectorised."""

    def score(
        self, logits: Logits, rows: Sequence[int], token_ids: Sequence[int], top_logprobs_num: int
    ) -> tuple[list[float], list[TopLogprobs]]:
        """log-softmax of the given token at each given row, and the best alternatives."""


class Pending(Protocol):
    """Tokens that are being sampled."""

    @property
    def places(self) -> Sequence[int]:
        """For each row, where the runner keeps its token until it samples again: ``Extend.follows`` of the next step. Empty if
        no step can follow."""

    def result(self) -> Sampled:
        """Waits until they are there. Raises what went wrong on the device meanwhile."""


class LaunchingRunner(Runner, Protocol):
    """A runner with a device that computes while Python goes on: ``forward`` and ``sample_later`` only launch.

    What is launched is computed in that order, so that the next step may be launched before the tokens of this one are known
    to anybody but the device.
    """

    def sample_later(self, logits: Logits, rows: Sequence[SampleRow]) -> Pending:
        """As ``sample``, but does not wait. The rows may change afterwards."""

    def recover(self, error: Exception) -> None:
        """A step failed with this error: free what it left behind. Raises DeviceLost if no step can be computed any more."""

    def stats(self) -> dict[str, Any]:
        """How steps were computed, and what was waited for."""


def launches(runner: Runner) -> TypeGuard[LaunchingRunner]:
    """Asked several times a step; a check of the whole protocol takes a hundred times as long."""
    return hasattr(runner, "sample_later")


class DeviceLost(BaseException):
    """The device cannot go on in this process. Not an Exception: those who handle the failure of a step must not handle this,
    as every further step would fail too. It ends the loop, and a server starts its scheduler process anew."""
