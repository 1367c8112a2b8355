"""Rotary embedding: which angle each position turns each pair of a head by.

Source: Su et al. 2021, arXiv:2104.09864.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trellis.runtime.models.config import ModelConfig

Rotary = tuple[Tensor, Tensor]
"""(cos, signed sin) of a batch, each [T, 1, D] in the model's dtype: both halves of the cosines are alike, the first half
of the sines is negated."""


def rotary_of(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotary:
    """positions: int64 [T]. frequencies: float32 [D / 2], radians a position."""
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [T, heads, D]: (a, b) → (a cos - b sin, b cos + a sin), a and b the halves of each head.

    Rolling by half a head swaps a and b, so the sines that carry the signs do the rest.
    Source: Su et al. 2021, arXiv:2104.09864, in the layout of GPT-NeoX.
    """
    cos, signed_sin = rotary
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Radians a position for each pair of a head: float32 [D / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors)
    # llama3: waves that turn often within the original context stay, rare ones slow down, a ramp in between.
    turns = scaling.original_context * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return frequencies * (ramp + (1 - ramp) / scaling.factor)
