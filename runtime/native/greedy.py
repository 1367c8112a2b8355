"""Greedy choice in one pass over the logits: no copy, no softmax, masks read as they are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from trellis.runtime.executor.contract import SampleRow
from trellis.runtime.native.abi import Library


def best_tokens(library: Library, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """The best token of each row's logits that its mask allows, or ``NO_TOKEN``; nothing else of the rows is looked at.

    logits: float32 [R, vocab]. Raises ValueError for a mask that does not cover the vocabulary.
    """
    vocab, count = logits.shape[1], len(rows)
    masks = (ctypes.c_void_p * count)()
    for i, row in enumerate(rows):
        if row.mask is not None:
            if len(row.mask) * 32 < vocab:
                raise ValueError(f"a mask of {len(row.mask)} words does not cover {vocab} tokens")
            masks[i] = row.mask.ctypes.data
    where = np.array([row.row for row in rows], np.int32)
    if count and not 0 <= int(where.min()) <= int(where.max()) < len(logits):
        raise IndexError(f"row {int(where.max())} of {len(logits)} rows of logits was asked for")
    chosen = np.empty(count, np.int32)
    library.functions.trellis_best_tokens(
        logits.data_ptr(), vocab, count, where.ctypes.data, masks, chosen.ctypes.data
    )
    tokens: list[int] = chosen.tolist()
    return tokens
