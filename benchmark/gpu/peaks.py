"""What the device can do at best, measured here and now: the other figures are shares of these."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from benchmark.gpu.stopwatch import Stopwatch


@dataclass(frozen=True)
class Peaks:
    """copy: bytes a second, read and written ones together, of a large copy inside the device. products: floating-point
    operations a second of a large square product in the model's dtype."""

    copy: float
    products: float


def measure_peaks(where: torch.device, dtype: torch.dtype, small: bool) -> Peaks:
    """small: sizes for a CPU, where the figures mean little. What it takes is given back to the device afterwards."""
    # Many times a cache, and little enough to fit beside a pool.
    size, side = ((1 << 24), 512) if small else ((1 << 30), 8192)
    peaks = Peaks(_copy(where, size), _products(where, dtype, side))
    if where.type == "cuda":
        torch.cuda.empty_cache()
    return peaks


def _copy(where: torch.device, size: int) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    return 2 * size / Stopwatch(where).seconds(functools.partial(target.copy_, source))


def _products(where: torch.device, dtype: torch.dtype, side: int) -> float:
    # Random values, not zeros: a chip draws less power for zeros and runs faster than it ever will on a model.
    a, b = (torch.randn(side, side, dtype=dtype, device=where) for _ in range(2))
    return 2 * side**3 / Stopwatch(where).seconds(lambda: a @ b)
