"""The pieces of a span, which ``paged_attention.py`` computed apart, become one result (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_pieces(
    out_ptr,
    pieces_ptr,
    levels_ptr,
    merges_ptr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
):
    """Grid: (merges, rows of a tile, KV_HEADS). merges: int32 [merges, 5], see ``trellis.runtime.attention.tiles``; the
    others as in ``attend_tiles``. A piece counts with the sum of its weights."""
    merge = merges_ptr + tl.program_id(0) * 5
    row_in_tile = tl.program_id(1)
    kv_head = tl.program_id(2)
    row = tl.load(merge + 1) + row_in_tile
    n_pieces = tl.load(merge + 4)
    if (n_pieces == 0) | (row >= tl.load(merge + 2)):  # padding
        return
    token = (tl.load(merge) + row // GROUP).to(tl.int64)
    first_piece = tl.load(merge + 3).to(tl.int64)
    dims = tl.arange(0, BLOCK_DIM)
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    top = float("-inf")
    total = 0.0
    for at in tl.range(0, n_pieces, BLOCK_PIECES):
        some = at + tl.arange(0, BLOCK_PIECES)
        kept = ((first_piece + some) * KV_HEADS + kv_head) * HEIGHT + row_in_tile
        levels = tl.load(levels_ptr + kept, mask=some < n_pieces, other=float("-inf"))
        there = (some < n_pieces)[:, None] & (dims < HEAD_DIM)[None, :]
        pieces = tl.load(pieces_ptr + kept[:, None] * HEAD_DIM + dims[None, :], mask=there, other=0.0)
        higher = tl.maximum(top, tl.max(levels, 0))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # a window may leave whole pieces unseen
        weights = tl.exp2(levels - level)
        shrink = tl.exp2(top - level)
        acc = acc * shrink + tl.sum(weights[:, None] * pieces, 0)
        total = total * shrink + tl.sum(weights, 0)
        top = higher
    written = ((token * KV_HEADS + kv_head) * GROUP + row % GROUP) * HEAD_DIM
    tl.store(out_ptr + written + dims, (acc / total).to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
