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
            logits[i, torch.tensor(list(row.forbidden), device=logits.device)] = -math.inf
        if row.params.logit_bias:
            _apply_bias(logits[i], row.params.logit_bias)
        if row.history is not None:
            _apply_penalties(logits[i], row.params, row.history, row.output_start)


def _apply_masks(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    masked = [(i, row.mask) for i, row in enumerate(rows) if row.mask is not None]
    if not masked:
        return
    vocab = logits.shape[1]
    for i, mask in masked:
        if len(mask) * 32 < vocab:
            raise ValueError(f"a mask of {len(mask)} words does not cover {vocab} tokens")
        data = torch.from_numpy(mask.view(np.uint8)[: (vocab + 7) // 8].astype(np.int32))
        bias = BYTE_TO_BIAS.index_select(0, data).flatten()[:vocab]
        logits[i] += bias.to(logits.device)


def _apply_bias(logits: Tensor, bias: dict[int, float]) -> None:
    ids = torch.tensor(list(bias), device=logits.device)
    logits[ids] += torch.tensor(list(bias.values()), device=logits.device)


def _apply_penalties(logits: Tensor, params: SamplingParams, history: IntArray, output_start: int) -> None:
    """repetition: over prompt and output, divides positive logits and multiplies negative ones (Keskar et al. 2019,
    arXiv:1909.05858). frequency, presence: over the output, subtracted by count and once."""
    if params.repetition_penalty != 1.0:
        ids = torch.from_numpy(np.unique(history).astype(np.int64)).to(logits.device)
        seen = logits[ids]
        logits[ids] = torch.where(
            seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty
        )
    output = history[output_start:]
    if len(output) and (params.frequency_penalty or params.presence_penalty):
        unique, counts = np.unique(output, return_counts=True)
        penalty = params.frequency_penalty * counts + params.presence_penalty
        ids = torch.from_numpy(unique.astype(np.int64)).to(logits.device)
        logits[ids] -= torch.from_numpy(penalty.astype(np.float32)).to(logits.device)
