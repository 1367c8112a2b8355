"""RMSNorm, alone and with the residual addition before it (Triton).

A row is read once and kept in registers; everything is computed in float32 and rounded once, when it is stored.
Source: Zhang and Sennrich 2019, arXiv:1910.07467.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trellis.runtime.kernels.launch import power_of_two


@triton.jit
def norm_rows(x_ptr, delta_ptr, weight_ptr, out_ptr, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows,). x, delta, out: [rows, width] without gaps. ADD: x becomes x + delta, rounded to its dtype, and that is
    what is normed; otherwise delta is not read."""
    at = tl.arange(0, BLOCK)
    inside = at < width
    place = tl.program_id(0).to(tl.int64) * width + at
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + place, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + place, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight
    tl.store(out_ptr + place, normed.to(out_ptr.dtype.element_ty), mask=inside)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., width]. weight: [width]. The result has the dtype of x."""
    x = x.contiguous()
    return _launched(x, x, weight, eps, add=False)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm). x, delta: [..., width], of one dtype. Overwrites x where it has no gaps."""
    x = x.contiguous()
    return x, _launched(x, delta.contiguous(), weight, eps, add=True)


def _launched(x: Tensor, delta: Tensor, weight: Tensor, eps: float, add: bool) -> Tensor:
    width = x.shape[-1]
    out = x.new_empty(x.shape)
    block = power_of_two(width)
    grid = (x.numel() // width,)
    norm_rows[grid](
        x, delta, weight, out, width, eps, ADD=add, BLOCK=block, num_warps=min(16, max(1, block // 512))
    )
    return out
