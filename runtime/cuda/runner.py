"""The model on a device, as the scheduler drives it: everything is launched, and results come when they are asked for."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trellis.runtime.attention.flashinfer_sampling import FlashInferSampler
from trellis.runtime.cuda.device import Device, Mark
from trellis.runtime.cuda.memory import PoolPlan
from trellis.runtime.cuda.sampling import draw_later, reports
from trellis.runtime.cuda.step import DeviceStep
from trellis.runtime.cuda.tokens import TokenTable
from trellis.runtime.cuda.waits import Waits
from trellis.runtime.executor.contract import DeviceLost, Logits, Pending, Sampled, SampleRow
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.executor.model_runner import StepRunner, own_logits
from trellis.runtime.messages import TopLogprobs
from trellis.runtime.models.config import ModelConfig


class DeviceRunner(StepRunner):
    """Implements ``trellis.runtime.executor.contract.LaunchingRunner``; see ``build.py`` for how one is made.

    plan: how the pool was sized, or None if its size was given. waits: see ``waits.py``. sampler: None for our own, whose draws
    depend on the request's seed alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        pool: KVPool,
        step: DeviceStep,
        device: Device,
        tokens: TokenTable,
        waits: Waits,
        plan: PoolPlan | None = None,
        sampler: FlashInferSampler | None = None,
    ) -> None:
        super().__init__(config, pool, step)
        self.counts = step.stats  # of the step itself, whatever is put around it
        self._own_step = step
        self.device = device
        self.waits = waits
        self.plan = plan
        self._tokens = tokens
        self._sampler = sampler
        self.followed = tokens.ids

    def sample(self, logits: Logits, rows: Sequence[SampleRow]) -> Sampled:
        return self.sample_later(logits, rows).result()

    @torch.inference_mode()
    def sample_later(self, logits: Logits, rows: Sequence[SampleRow]) -> Pending:
        """Log-probabilities of the sampled tokens are waited for; see ``REASONS["reports"]``."""
        if not rows:
            return _Known(Sampled([], [], []))
        if any(map(reports, rows)):
            with self.waits.named("reports"):
                return _Known(super().sample(logits, rows))
        ids = draw_later(own_logits(logits).hand_over(rows), rows, self.device, self._sampler)
        places = self._tokens.put(ids)
        host = self.device.pinned(len(rows), torch.int64)
        host.copy_(ids, non_blocking=True)
        return _Copied(places, host, self.device.mark(), self.waits)

    def score(
        self, logits: Logits, rows: Sequence[int], token_ids: Sequence[int], top_logprobs_num: int
    ) -> tuple[list[float], list[TopLogprobs]]:
        with self.waits.named("reports"):
            return super().score(logits, rows, token_ids, top_logprobs_num)

    def recover(self, error: Exception) -> None:
        """What the failed step holds is freed, and memory that is free is given back, as another split of it may serve the
        next step. Raises DeviceLost when the device answers no more."""
        traceback.clear_frames(error.__traceback__)
        try:
            with self.waits.named("failure"):
                self.device.check()
        except RuntimeError as broken:
            raise DeviceLost(f"the device cannot go on: {broken}") from error
        if isinstance(error, torch.OutOfMemoryError):
            self.device.give_back()

    def release(self) -> None:
        """The graphs: NCCL waits without end for those that its collectives are recorded in before it gives up a group
        (``commDestroySync`` in its ``init.cc``)."""
        if self._own_step.graphs is not None:
            self._own_step.graphs.drop("the runner was released")

    def stats(self) -> dict[str, Any]:
        """See ``DeviceStep.stats``; waits: name in ``REASONS`` → how often."""
        return {"device": self.device.name, **self.counts(), "waits": dict(self.waits.counts)}


@dataclass(frozen=True)
class _Known:
    """Tokens that are there already. Nothing follows them on the device."""

    sampled: Sampled
    places: Sequence[int] = ()

    def result(self) -> Sampled:
        return self.sampled


@dataclass(frozen=True)
class _Copied:
    """Tokens on their way to the host."""

    places: Sequence[int]
    host: Tensor
    mark: Mark
    waits: Waits

    def result(self) -> Sampled:
        with self.waits.named("results"):
            self.mark.wait()
        nothing: list[None] = [None] * len(self.places)
        return Sampled(self.host.tolist(), list(nothing), list(nothing))
