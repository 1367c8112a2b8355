"""What a step may launch is launched once at the start: kernels are compiled when they are first used, which takes seconds, and the
request that happens to be the first would wait for them."""

from __future__ import annotations

import numpy as np

from trellis.runtime.attention.flashinfer_sampling import FlashInferSampler
from trellis.runtime.cuda.device import Device
from trellis.runtime.cuda.sampling import draw_later
from trellis.runtime.cuda.step import DeviceStep
from trellis.runtime.executor.contract import Extend, SampleRow
from trellis.runtime.messages import SamplingParams

LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # of the extends: attention has kernels for few tokens and for many
PREFIX = 512  # tokens before each, enough that they are read in pieces


def every_kind_of_extend(page_size: int = 1) -> list[Extend]:
    """All of their tokens are in the sink's page."""
    sink = np.arange(PREFIX + max(LENGTHS), dtype=np.int32) % page_size
    return [Extend(np.zeros(n, np.int32), PREFIX, sink[: PREFIX + n], n - 1) for n in LENGTHS]


def warm_up(step: DeviceStep, device: Device, sampler: FlashInferSampler | None = None) -> None:
    """A step of extends, then one of a decode; masked rows are drawn of both. Launched, not waited for."""
    vocab = step.model.config.vocab_size
    mask = np.full(-(-vocab // 32), -1, np.int32)
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01)
    extends = every_kind_of_extend(step.attention.pool.page_size)
    for some in (extends, extends[:1]):
        rows = [SampleRow(at, params, seed=0, step=0, mask=mask) for at in range(len(some))]
        draw_later(step.forward(some).take(range(len(some))), rows, device, sampler)
