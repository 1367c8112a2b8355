"""What a request may say about its next token before anything is drawn: masks, biases and penalties.

Every function changes float32 logits [N, vocab] in place; row i belongs to ``rows[i]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trellis.runtime.executor.contract import IntArray, SampleRow
from trellis.runtime.executor.transfer import to_device
from trellis.runtime.kernels.sampling import mask_on_device
from trellis.runtime.messages import SamplingParams

# For each byte of a mask, what to add to the eight logits it speaks of: 0 or -inf, lowest bit first. A lookup and an
# addition cost about a tenth of unpacking the bits and a masked fill.
BYTE_TO_BIAS = torch.tensor(
    [[0.0 if byte >> bit & 1 else -math.inf for bit in range(8)] for byte in range(256)]
)


def adjust(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Masks, forbidden tokens, biases and penalties, in this order."""
    _apply_masks(logits, rows)
    for i, row in enumerate(rows):
        if len(row.forbidden):
            forbidden = to_device(np.array(list(row.forbidden), np.int64), logits.device)
            logits[i].index_fill_(0, forbidden, -math.inf)
        if row.params.logit_bias:
            _apply_bias(logits[i], row.params.logit_bias)
        if row.history is not None:
            _apply_penalties(logits[i], row.params, row.history, row.output_start)


def _apply_masks(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    masked = [(i, row.mask) for i, row in enumerate(rows) if row.mask is not None]
    if not masked:
        return
    vocab = logits.shape[1]
    for _, mask in masked:
        if len(mask) * 32 < vocab:
            raise ValueError(f"a mask of {len(mask)} words does not cover {vocab} tokens")
    if logits.device.type != "cpu":
        mask_of_row = np.full(len(rows), -1, np.int32)
        mask_of_row[[i for i, _ in masked]] = np.arange(len(masked))
        words = np.stack([mask for _, mask in masked])  # they go as they are, a bit a token
        mask_on_device(logits, to_device(words, logits.device), to_device(mask_of_row, logits.device))
        return
    for i, mask in masked:
        data = torch.from_numpy(mask.view(np.uint8)[: (vocab + 7) // 8].astype(np.int32))
        logits[i] += BYTE_TO_BIAS.index_select(0, data).flatten()[:vocab]


def _apply_bias(logits: Tensor, bias: dict[int, float]) -> None:
    ids = to_device(np.fromiter(bias, np.int64, len(bias)), logits.device)
    logits.index_add_(0, ids, to_device(np.fromiter(bias.values(), np.float32, len(bias)), logits.device))


def _apply_penalties(logits: Tensor, params: SamplingParams, history: IntArray, output_start: int) -> None:
    """repetition: over prompt and output, divides positive logits and multiplies negative ones (Keskar et al. 2019,
    arXiv:1909.05858). frequency, presence: over the output, subtracted by count and once."""
    if params.repetition_penalty != 1.0:
        ids = to_device(np.unique(history).astype(np.int64), logits.device)
        seen = logits[ids]
        logits[ids] = torch.where(
            seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty
        )
    output = history[output_start:]
    if len(output) and (params.frequency_penalty or params.presence_penalty):
        unique, counts = np.unique(output, return_counts=True)
        penalty = params.frequency_penalty * counts + params.presence_penalty
        ids = to_device(unique.astype(np.int64), logits.device)
        logits[ids] -= to_device(penalty.astype(np.float32), logits.device)
