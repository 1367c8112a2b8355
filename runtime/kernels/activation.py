"""The gate of the decoder's MLP: silu(gate) * up (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def gate_rows(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """Grid: (rows, blocks of width). gate_up: [rows, 2 * width]; out: [rows, width]; both without gaps."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up_ptr + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + at, gated.to(out_ptr.dtype.element_ty), mask=inside)


def gate(gate_up: Tensor) -> Tensor:
    """[T, 2I] → [T, I], in the same dtype; computed in float32."""
    gate_up = gate_up.contiguous()
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    gate_rows[(rows, triton.cdiv(width, BLOCK))](gate_up, out, width, BLOCK=BLOCK)
    return out
