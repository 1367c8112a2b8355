"""Rotary embedding: which angle each position turns each pair of a head by.

Source: Su et al. 2021, arXiv:2104.09864.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trellis.runtime.models.config import ModelConfig
from trellis.runtime.models.rope import RopeScaling

Rotary = tuple[Tensor, Tensor]
"""(cos, signed sin) of a batch, each [T, 1, D] in the model's dtype: both halves of the cosines are alike, the first half
of the sines is negated."""


def rotary_of(positions: Tensor, frequencies: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Rotary:
    """positions: int64 [T]. frequencies: float32 [D / 2], radians a position. scale: what both are multiplied by, see
    ``rotary_scale``."""
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [T, heads, D]: (a, b) → (a cos - b sin, b cos + a sin), a and b the halves of each head.

    Rolling by half a head swaps a and b, so the sines that carry the signs do the rest.
    Source: Su et al. 2021, arXiv:2104.09864, in the layout of GPT-NeoX.
    """
    cos, signed_sin = rotary
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def rotary_scale(config: ModelConfig) -> float:
    """What cosines and sines are multiplied by: other than 1 only with YaRN, whose scores grow by its square."""
    return 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Radians a position for each pair of a head: float32 [D / 2]."""
    scaling, theta = config.rope_scaling, config.rope_theta
    if scaling is None:
        return _frequencies(theta, config.head_dim)
    if scaling.kind == "dynamic":
        return _frequencies(
            _dynamic_base(theta, config.head_dim, scaling, config.context_length), config.head_dim
        )
    frequencies = _frequencies(theta, config.head_dim)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors)
    if scaling.kind == "yarn":
        kept = 1 - _yarn_ramp(theta, config.head_dim, scaling)
    else:
        turns = scaling.original_context * frequencies / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _frequencies(theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (theta**exponents)


def _dynamic_base(theta: float, head_dim: int, scaling: RopeScaling, context: int) -> float:
    """NTK-aware scaling, for one context.

    As proposed, the base changes whenever a sequence becomes longer than all before. But keys are rotated before they are
    cached, and shared by requests of other lengths: those of one base mean nothing to queries of another. So there is one
    base, that of the longest sequence that is served: what the formula gives for a prompt of this length.
    """
    length = max(context, scaling.original_context)
    stretch = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
    return theta * float(stretch ** (head_dim / (head_dim - 2)))


def _yarn_ramp(theta: float, head_dim: int, scaling: RopeScaling) -> Tensor:
    """How far each frequency is stretched, 0 to 1: float32 [D / 2]. Source: Peng et al. 2023, arXiv:2309.00071, section 3.2."""

    def place(turns: float) -> float:
        """Which frequency turns so often in the original context."""
        return head_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
