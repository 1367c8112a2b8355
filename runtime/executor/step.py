"""How a step is computed: op by op in torch, or in one call of C++."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trellis.errors import ModelLoadError
from trellis.runtime.attention.base import AttentionShape
from trellis.runtime.attention.registry import create_attention
from trellis.runtime.executor.batch import flatten, pack
from trellis.runtime.executor.contract import EXECUTORS, Extend, SampleRow
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.executor.transfer import to_device
from trellis.runtime.models.decoder import Decoder
from trellis.runtime.native.build import KernelsUnavailable
from trellis.runtime.native.decoder import AS_GIVEN, NativeDecoder, PoolPointers, unsupported
from trellis.runtime.native.greedy import best_tokens
from trellis.runtime.native.library import best_library
from trellis.runtime.native.quantized import Quantization

# Logits are computed at once up to this many values (256 MiB), and beyond that when they are read, so that scoring a
# long prompt over a large vocabulary does not need gigabytes.
EAGER_VALUES = 64 << 20

logger = logging.getLogger(__name__)


class LogitsRows:
    """The rows that were asked for in one forward: their logits, float32 [R, vocab], or their hidden states [R, hidden]
    and what makes logits of them."""

    def __init__(
        self,
        values: Tensor | None,
        hidden: Tensor,
        logits: Callable[[Tensor], Tensor],
        choose: Callable[[Tensor, Sequence[SampleRow]], list[int]] | None = None,
    ) -> None:
        self._values = values
        self._hidden = hidden
        self._logits = logits
        self._choose = choose
        # What surrounds the computation of rows that are not there yet: other processes may have a part in it.
        self.around_late_rows: Callable[[Sequence[int]], AbstractContextManager[None]] = lambda _: (
            nullcontext()
        )

    def __len__(self) -> int:
        return len(self._hidden if self._values is None else self._values)

    def best(self, rows: Sequence[SampleRow]) -> list[int] | None:
        """The best token that each row's mask allows, without a copy of the logits; None where that cannot be had."""
        if self._choose is None or self._values is None:
            return None
        return self._choose(self._values, rows)

    def take(self, rows: Sequence[int]) -> Tensor:
        """A fresh copy of some rows: float32 [len(rows), vocab]."""
        if self._values is not None:
            return self._values.index_select(0, _index(rows, self._values))
        with self.around_late_rows(rows):
            return self._logits(self._hidden.index_select(0, _index(rows, self._hidden)))

    def hand_over(self, rows: Sequence[SampleRow]) -> Tensor:
        """As ``take``, but without a copy where all rows are wanted as they are, which are the caller's to change then."""
        wanted = [row.row for row in rows]
        if self._values is not None and wanted == list(range(len(self._values))):
            return self._values
        return self.take(wanted)


class Step(Protocol):
    """Computes extends over one pool."""

    name: str

    def forward(self, extends: Sequence[Extend]) -> LogitsRows:
        """All extends as one ragged batch; their K/V is in the pool afterwards."""


class TorchStep:
    """The reference: the decoder op by op, with an attention backend of its own."""

    name = "torch"

    def __init__(self, model: Decoder, pool: KVPool, attention: str) -> None:
        self.model = model
        self.attention = create_attention(attention, AttentionShape.of(model.config), pool)

    def forward(self, extends: Sequence[Extend]) -> LogitsRows:
        batch = pack(extends, self.model.device)
        self.attention.plan(batch)
        hidden = self.model.forward(batch.token_ids, batch.positions, self.attention)
        wanted = hidden.index_select(0, batch.logits_rows)
        eager = 0 < len(wanted) * self.model.config.vocab_size <= EAGER_VALUES
        return LogitsRows(self.model.logits(wanted) if eager else None, wanted, self.model.logits)


class NativeStep:
    """One call a step. Holds its own, packed copy of the weights."""

    name = "native"

    def __init__(self, decoder: NativeDecoder, pool: KVPool) -> None:
        self.decoder = decoder
        self.pointers = PoolPointers(pool)
        self._choose = functools.partial(best_tokens, decoder.library)

    def forward(self, extends: Sequence[Extend]) -> LogitsRows:
        batch, config = flatten(extends), self.decoder.config
        rows = batch.n_logits
        if rows * config.vocab_size <= EAGER_VALUES:
            values = torch.empty((rows, config.vocab_size), dtype=torch.float32)
            self.decoder.step(batch, self.pointers, logits=values if rows else None)
            return LogitsRows(values, values, self.decoder.logits, self._choose)
        hidden = torch.empty((rows, config.hidden_size), dtype=torch.float32)
        self.decoder.step(batch, self.pointers, hidden=hidden)
        return LogitsRows(None, hidden, self.decoder.logits)


def make_step(
    model: Decoder,
    pool: KVPool,
    executor: str,
    attention: str,
    threads: int,
    quantization: Quantization = AS_GIVEN,
    deterministic: bool = False,
) -> Step:
    """executor: ``native``, ``torch``, or ``auto``: native where it can run this model on this machine.

    An attention backend that is asked for by name belongs to the torch decoder, which is then used. Raises ModelLoadError
    when ``native`` is asked for and cannot be had, for unknown names, and for a quantization or ``deterministic`` (see
    ``NativeDecoder``) where the step is not native: torch computes with the weights as they are, and adds up in an order
    that depends on the batch.
    """
    if executor not in EXECUTORS:
        raise ModelLoadError(f"executor {executor!r} is unknown; known: {', '.join(EXECUTORS)}")
    if executor == "native" and attention != "auto":
        raise ModelLoadError(
            f"the native executor has an attention of its own; with attention backend {attention!r} use "
            "executor 'torch'"
        )
    if executor == "torch" or attention != "auto":
        if quantization.name != "none":
            raise ModelLoadError(
                f"quantization {quantization.name!r} is for the native executor, not for executor {executor!r} with "
                f"attention backend {attention!r}; take 'auto' for both, or quantization 'none'"
            )
        if deterministic:
            raise ModelLoadError(
                f"deterministic steps are for the native executor, not for executor {executor!r} with attention backend "
                f"{attention!r}; take 'auto' for both"
            )
        return TorchStep(model, pool, attention)
    reason = unsupported(model.config, model.dtype, model.device)
    if reason is None:
        try:
            library = best_library()
            step = NativeStep(NativeDecoder(library, model, threads, quantization, deterministic), pool)
        except KernelsUnavailable as error:
            reason = str(error)
        else:
            logger.info("native executor: %s kernels, %d threads", library.isa, threads)
            return step
    if executor == "native":
        raise ModelLoadError(f"the native executor cannot be used: {reason}")
    if quantization.name != "none":
        raise ModelLoadError(
            f"quantization {quantization.name!r} needs the native executor, which cannot be used: {reason}; "
            "quantization 'none' runs on torch"
        )
    if deterministic:
        raise ModelLoadError(f"deterministic steps need the native executor, which cannot be used: {reason}")
    if model.device.type == "cpu":
        logger.warning("steps are computed by torch, several times slower than natively: %s", reason)
    return TorchStep(model, pool, attention)


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return to_device(np.array(rows, np.int64), like.device)
