"""Attention of a ragged batch over the slot pool: tiles of queries against spans of keys (Triton).

One kernel serves prefill chunks, forced runs and decodes. The queries of an extend of n tokens that share a key head are
n * GROUP rows, token by token; a tile is HEIGHT of them, so that keys are read once for all heads of the group, and a
decode is a tile of GROUP rows. The softmax is computed as keys pass (Dao et al. 2022, arXiv:2205.14135; exponents are of
base 2). A long span may be cut in pieces that are computed at the same time and merged afterwards (flash-decoding: Dao et
al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html); see ``merge_pieces.py``. Which tiles, spans and pieces
there are is read from the device, so that a captured launch serves later batches too; ``trellis.runtime.attention.tiles``
makes those tables.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_span(
    begin,
    end,
    q,
    positions,
    acc,
    top,
    total,
    k_ptr,
    v_ptr,
    slots_ptr,
    inner,
    outer,
    window,
    SLOT_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """Let the rows see keys begin .. end - 1 of their sequence. MASKED: not every row sees all of them; if it is not set,
    their number is a multiple of BLOCK_KEYS. acc: [HEIGHT, BLOCK_DIM], top, total: [HEIGHT] → the same, updated."""
    dims = tl.arange(0, BLOCK_DIM)
    for at in tl.range(begin, end, BLOCK_KEYS):
        keys = at + tl.arange(0, BLOCK_KEYS)
        slots = tl.load(slots_ptr + keys, mask=keys < end, other=0) if MASKED else tl.load(slots_ptr + keys)
        # 64 bits: a slot's place in a pool may be past 2^31.
        places = slots.to(tl.int64)[:, None] * SLOT_STRIDE + dims[None, :]
        if MASKED or BLOCK_DIM != HEAD_DIM:
            there = (keys < end)[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_ptr + places, mask=there, other=0.0)
            v = tl.load(v_ptr + places, mask=there, other=0.0)
        else:
            k = tl.load(k_ptr + places)
            v = tl.load(v_ptr + places)
        scores = tl.dot(q, tl.trans(k.to(FACTORS)), input_precision=PRECISION) * inner
        if CAPPED:  # tanh(x) is 1 - 2 / (exp(2 x) + 1)
            scores = outer * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        if MASKED:
            seen = (keys[None, :] <= positions[:, None]) & (keys < end)[None, :]
            if WINDOWED:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        level = higher
        if MASKED:  # a row may have seen nothing yet, and -inf - -inf is no number
            level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(top - level)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(FACTORS), v.to(FACTORS), acc * shrink[:, None], input_precision=PRECISION)
        top = higher
    return acc, top, total


@triton.jit
def attend_tiles(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    pieces_ptr,
    levels_ptr,
    items_ptr,
    slots_ptr,
    q_token_stride,
    q_head_stride,
    inner,
    outer,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """Grid: (items * KV_HEADS); the heads of an item are neighbours, since their keys are.

    q: [T, heads, HEAD_DIM], its last dimension dense. k, v: a pool's tensors, [slots + 1, KV_HEADS, HEAD_DIM], dense.
    out: [T, heads, HEAD_DIM], dense. items: int32 [items, 8], see ``trellis.runtime.attention.tiles``. slots: int32, the
    slots of all sequences. pieces: float32 [n, KV_HEADS, HEIGHT, HEAD_DIM] and levels: float32 [n, KV_HEADS, HEIGHT], what
    each piece of a span found, and the logarithm (base 2) of the sum of its weights.
    Scores, as exponents of 2, are q k inner; if CAPPED, outer * tanh(x) with exp(2 x) = 2^(q k inner).
    WHOLE: blocks that every row sees in full are done in a loop of their own, without masks. FACTORS: the type of what is
    multiplied. PRECISION: of products of float32.
    """
    kv_head = tl.program_id(0) % KV_HEADS
    item = items_ptr + tl.program_id(0) // KV_HEADS * 8
    begin = tl.load(item + 5)
    end = tl.load(item + 6)
    if begin >= end:  # padding
        return
    first_token = tl.load(item)
    first_row = tl.load(item + 1)
    n_rows = tl.load(item + 2)
    start = tl.load(item + 3)
    sequence = slots_ptr + tl.load(item + 4)
    piece = tl.load(item + 7)

    rows = first_row + tl.arange(0, HEIGHT)
    dims = tl.arange(0, BLOCK_DIM)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    positions = start + tokens
    there = (rows < n_rows)[:, None] & (dims < HEAD_DIM)[None, :]
    token_rows = (first_token + tokens).to(tl.int64)
    asked = token_rows * q_token_stride + heads * q_head_stride
    q = tl.load(q_ptr + asked[:, None] + dims[None, :], mask=there, other=0.0).to(FACTORS)

    acc = tl.zeros([HEIGHT, BLOCK_DIM], tl.float32)
    top = tl.full([HEIGHT], float("-inf"), tl.float32)
    total = tl.zeros([HEIGHT], tl.float32)
    k_head = k_ptr + kv_head * HEAD_DIM
    v_head = v_ptr + kv_head * HEAD_DIM
    SLOT_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM

    rest = begin
    if WHOLE:
        whole = begin
        if WINDOWED:  # begin with blocks of which the last row no longer sees all
            last = start + (tl.minimum(first_row + HEIGHT, n_rows) - 1) // GROUP
            hidden = tl.maximum(last - window + 1 - begin, 0)
            whole = tl.minimum(begin + tl.cdiv(hidden, BLOCK_KEYS) * BLOCK_KEYS, end)
            acc, top, total = attend_span(
                begin, whole, q, positions, acc, top, total, k_head, v_head, sequence, inner, outer, window,
                SLOT_STRIDE, HEAD_DIM, BLOCK_DIM, BLOCK_KEYS, CAPPED, WINDOWED, True, PRECISION, FACTORS,
            )  # fmt: skip
        seen_by_first = tl.minimum(start + first_row // GROUP + 1, end)
        rest = whole + tl.maximum(seen_by_first - whole, 0) // BLOCK_KEYS * BLOCK_KEYS
        acc, top, total = attend_span(
            whole, rest, q, positions, acc, top, total, k_head, v_head, sequence, inner, outer, window,
            SLOT_STRIDE, HEAD_DIM, BLOCK_DIM, BLOCK_KEYS, CAPPED, WINDOWED, False, PRECISION, FACTORS,
        )  # fmt: skip
    acc, top, total = attend_span(
        rest, end, q, positions, acc, top, total, k_head, v_head, sequence, inner, outer, window,
        SLOT_STRIDE, HEAD_DIM, BLOCK_DIM, BLOCK_KEYS, CAPPED, WINDOWED, True, PRECISION, FACTORS,
    )  # fmt: skip

    found = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if piece < 0:
        written = (token_rows * (KV_HEADS * GROUP) + heads) * HEAD_DIM
        tl.store(out_ptr + written[:, None] + dims[None, :], found.to(out_ptr.dtype.element_ty), mask=there)
    else:
        kept = (piece.to(tl.int64) * KV_HEADS + kv_head) * HEIGHT + tl.arange(0, HEIGHT)
        tl.store(pieces_ptr + kept[:, None] * HEAD_DIM + dims[None, :], found, mask=there)
        level = tl.where(total == 0.0, float("-inf"), top + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(levels_ptr + kept, level, mask=rows < n_rows)
