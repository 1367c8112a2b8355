"""Drawing the tokens of a step on the device, without a wait."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from trellis.runtime.attention.flashinfer_sampling import FlashInferSampler
from trellis.runtime.cuda.device import Device
from trellis.runtime.cuda.staging import send_together
from trellis.runtime.executor.adjust import adjust
from trellis.runtime.executor.contract import NO_TOKEN, SampleRow
from trellis.runtime.executor.sampler import is_greedy
from trellis.runtime.kernels.sampling import DeviceSampling, sample_on_device


def draw_later(
    logits: Tensor, rows: Sequence[SampleRow], device: Device, other: FlashInferSampler | None = None
) -> Tensor:
    """One token a row: int64 [N] on the device, or ``NO_TOKEN``. logits: float32 [N, vocab], overwritten.

    The same token as ``trellis.runtime.executor.sampler.sample`` gives for the same logits, seed and step, unless ``other`` draws
    what is not greedy.
    """
    adjust(logits, rows)
    if all(map(is_greedy, rows)):
        best = logits.max(-1)
        return best.indices.masked_fill(~best.values.isfinite(), NO_TOKEN)
    sampling = _sent(DeviceSampling.of(rows), device)
    return sample_on_device(logits, sampling) if other is None else other.draw(logits, rows, sampling)


def reports(row: SampleRow) -> bool:
    """Whether the row asks for more than its token."""
    return row.want_logprob or row.top_logprobs_num > 0


def _sent(sampling: DeviceSampling, device: Device) -> DeviceSampling:
    names = [field.name for field in dataclasses.fields(sampling)]
    columns: list[Tensor] = send_together([getattr(sampling, name) for name in names], device)
    return DeviceSampling(**dict(zip(names, columns, strict=True)))
