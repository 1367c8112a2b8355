"""Between the projection and attention: norms of heads, rotary embedding, and the store of keys and values (Triton).

One pass instead of five: what the projection wrote is read once, queries are written for the attention, keys and values
go straight to their slots. Computed in float32, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trellis.runtime.kernels.launch import power_of_two
from trellis.runtime.models.rotary import Rotary

TILE = 2048  # values of the heads that one program takes


@triton.jit
def to_e4m3(x):
    """float32 → the bits of float8_e4m3fn as uint8, rounded to the nearest, ties to even; what is too large becomes 448.

    By integers, so that it is the same on every chip, also on those that have no such type.
    """
    magnitude = tl.abs(x)
    bits = tl.minimum(magnitude, 448.0).to(tl.int32, bitcast=True)
    # 20 of the 23 bits of the mantissa go; the exponent's bias changes from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 numbers are multiples of 2^-9. Adding 2^23 leaves no bits for fractions, and rounds.
    tiny = (magnitude * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0.015625, tiny, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def rotate_and_store_heads(
    heads_ptr,
    query_norm_ptr,
    key_norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    queries_ptr,
    keys_ptr,
    values_ptr,
    eps,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORMED: tl.constexpr,
    E4M3: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Grid: (tokens, blocks of heads). heads: [T, QUERIES + 2 * KV_HEADS, HEAD_DIM]; cos, sin: [T, HEAD_DIM], the sines
    with the signs of ``rotate``; queries: [T, QUERIES, HEAD_DIM]; keys, values: [slots, KV_HEADS, HEAD_DIM]; slots: int64 [T].
    E4M3: keys and values are uint8, the bits of float8_e4m3fn."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    at = tl.arange(0, BLOCK_HALF)[None, :]
    half: tl.constexpr = HEAD_DIM // 2
    every: tl.constexpr = QUERIES + 2 * KV_HEADS
    is_query = head < QUERIES
    is_value = head >= QUERIES + KV_HEADS
    inside = (head < every) & (at < half)
    # a and b: the two halves of each head, which rotary embedding turns pairwise.
    place = (token * every + head) * HEAD_DIM + at
    a = tl.load(heads_ptr + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(heads_ptr + place + half, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * HEAD_DIM + at, mask=at < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HEAD_DIM + half + at, mask=at < half, other=0.0).to(tl.float32)
    turned_a, turned_b = a, b
    if NORMED:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM + eps)[:, None]
        of_query_a = tl.load(query_norm_ptr + at, mask=at < half, other=0.0).to(tl.float32)
        of_query_b = tl.load(query_norm_ptr + half + at, mask=at < half, other=0.0).to(tl.float32)
        of_key_a = tl.load(key_norm_ptr + at, mask=at < half, other=0.0).to(tl.float32)
        of_key_b = tl.load(key_norm_ptr + half + at, mask=at < half, other=0.0).to(tl.float32)
        turned_a = a * scale * tl.where(is_query, of_query_a, of_key_a)
        turned_b = b * scale * tl.where(is_query, of_query_b, of_key_b)
    first = tl.where(is_value, a, turned_a * cos - turned_b * sin)
    second = tl.where(is_value, b, turned_b * cos + turned_a * sin)
    place = (token * QUERIES + head) * HEAD_DIM + at
    wide = queries_ptr.dtype.element_ty
    tl.store(queries_ptr + place, first.to(wide), mask=inside & is_query)
    tl.store(queries_ptr + place + half, second.to(wide), mask=inside & is_query)
    if E4M3:
        first, second = to_e4m3(first), to_e4m3(second)
    else:
        stored = keys_ptr.dtype.element_ty
        first, second = first.to(stored), second.to(stored)
    slot = tl.load(slots_ptr + token)
    is_key = inside & (head >= QUERIES) & (head < QUERIES + KV_HEADS)
    place = (slot * KV_HEADS + head - QUERIES) * HEAD_DIM + at
    tl.store(keys_ptr + place, first, mask=is_key)
    tl.store(keys_ptr + place + half, second, mask=is_key)
    place -= KV_HEADS * HEAD_DIM
    tl.store(values_ptr + place, first, mask=inside & is_value)
    tl.store(values_ptr + place + half, second, mask=inside & is_value)


def rotate_and_store(
    heads: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    rotary: Rotary,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """heads: [T, H + 2G, D], queries, keys, values. query_norm, key_norm: [D] both, or neither. slots: int64 [T], distinct
    but for the padding sink. keys, values: a layer of the pool, [slots, G, D], of any floating dtype; what is past the range
    of float8_e4m3fn becomes its largest number. Returns the queries, [T, H, D] in the dtype of heads."""
    tokens, every, head_dim = heads.shape
    kv_heads = keys.shape[1]
    queries = heads.new_empty((tokens, every - 2 * kv_heads, head_dim))
    cos, sin = rotary
    normed = query_norm is not None and key_norm is not None
    half = power_of_two(head_dim // 2)
    e4m3 = keys.dtype == torch.float8_e4m3fn
    block_heads = max(1, min(power_of_two(every), TILE // (2 * half)))
    rotate_and_store_heads[(tokens, triton.cdiv(every, block_heads))](
        heads.contiguous(),
        query_norm if normed else heads,
        key_norm if normed else heads,
        cos.contiguous(),
        sin.contiguous(),
        slots,
        queries,
        keys.view(torch.uint8) if e4m3 else keys,
        values.view(torch.uint8) if e4m3 else values,
        eps,
        QUERIES=queries.shape[1],
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        NORMED=normed,
        E4M3=e4m3,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=half,
    )
    return queries
