"""Grammar masks on the device, packed and by row index (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def mask_rows(logits_ptr, row_stride, words_ptr, words_per_mask, mask_of_row_ptr, vocab, BLOCK: tl.constexpr):
    """Grid: (rows, blocks of the vocabulary). logits: float32 [N, vocab], rows ``row_stride`` apart; words: int32
    [M, words_per_mask]; mask_of_row: int32 or int64 [N], -1 for none."""
    row = tl.program_id(0).to(tl.int64)
    mask = tl.load(mask_of_row_ptr + row).to(tl.int64)
    if mask < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    words = tl.load(words_ptr + mask * words_per_mask + token // 32, mask=inside, other=0)
    allowed = (words >> (token % 32)) & 1
    # Added, not overwritten: a NaN stays one, so that a broken row is not mistaken for a good one.
    bias = tl.where(allowed != 0, 0.0, float("-inf"))
    place = logits_ptr + row * row_stride + token
    tl.store(place, tl.load(place, mask=inside, other=0.0) + bias, mask=inside)


def mask_by_triton(logits: Tensor, words: Tensor, mask_of_row: Tensor) -> None:
    """See ``trellis.runtime.kernels.sampling.mask_on_device``."""
    rows, vocab = logits.shape
    grid = (rows, triton.cdiv(vocab, BLOCK))
    mask_rows[grid](logits, logits.stride(0), words, words.shape[1], mask_of_row, vocab, BLOCK=BLOCK)
