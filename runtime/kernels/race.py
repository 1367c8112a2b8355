"""The draw of a token: a race of those that the limits left, with Gumbel noise (Triton).

The noise of a token is a function of (seed, step, token), the one that ``trellis.runtime.executor.noise`` computes on the
host: the same bits, and logarithms in double precision, so that a request draws the same text on either. The race of a
row is run in blocks at the same time; their winners meet in a second kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trellis.runtime.executor.contract import NO_TOKEN
from trellis.runtime.kernels.launch import power_of_two
from trellis.runtime.kernels.limits import distances, find_limits
from trellis.runtime.kernels.sampling import DeviceSampling

GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
NO_ID = tl.constexpr(NO_TOKEN)
LAST_ID = tl.constexpr(0x7FFFFFFF)
LIMIT_BLOCK = 4096  # tokens of a row that one pass of ``find_limits`` takes at a time
RACE_BLOCK = 2048


@triton.jit
def mix(x):
    """The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). x: uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def noise_bits(seed, step, token):
    """64 random bits a token. seed, step: int64; token: int32."""
    start = mix(mix(seed.to(tl.uint64)) + step.to(tl.uint64) * GAMMA)
    return mix(start + (token.to(tl.uint64) + 1) * GAMMA)


@triton.jit
def gumbel(seed, step, token):
    uniform = ((noise_bits(seed, step, token) >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2^-53
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def race_blocks(
    logits_ptr,
    row_stride,
    temperatures_ptr,
    top_ks_ptr,
    min_ps_ptr,
    seeds_ptr,
    steps_ptr,
    best_ptr,
    cuts_ptr,
    heights_ptr,
    winners_ptr,
    vocab,
    BLOCK: tl.constexpr,
):
    """Grid: (rows, blocks of the vocabulary). The first nine as in ``DeviceSampling`` and ``find_limits``; heights: float32
    and winners: int32, both [N, blocks], are written: the best of each block, the first of several, and how high it came."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures_ptr + row)
    is_greedy = (temperature == 0) | (tl.load(top_ks_ptr + row) == 1)
    temperature = tl.where(is_greedy, 1.0, temperature)
    best = tl.load(best_ptr + row)
    distance = distances(logits_ptr + row * row_stride, token, vocab, best, temperature)
    key = distance.to(tl.int32, bitcast=True)
    cut = tl.load(cuts_ptr + 2 * row)
    stays = (key < cut) | ((key == cut) & (token < tl.load(cuts_ptr + 2 * row + 1)))
    stays &= distance <= -tl.log(tl.load(min_ps_ptr + row))  # min-p: exp(-distance) is its share of the best
    height = tl.where(stays, -distance, float("-inf"))
    # Most blocks have nobody left when there are limits, and noise is what costs.
    if (is_greedy == 0) & (tl.max(stays.to(tl.int32), 0) > 0):
        height += gumbel(tl.load(seeds_ptr + row), tl.load(steps_ptr + row), token)
    top = tl.max(height, 0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(heights_ptr + place, top)
    tl.store(winners_ptr + place, tl.min(tl.where(height == top, token, LAST_ID), 0))


@triton.jit
def join_blocks(heights_ptr, winners_ptr, best_ptr, ids_ptr, blocks, BLOCK: tl.constexpr):
    """Grid: (rows,). heights, winners: [N, blocks] as above; best: float32 [N] → ids: int64 [N]."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    place = row * blocks + block
    height = tl.load(heights_ptr + place, mask=block < blocks, other=float("-inf"))
    winner = tl.load(winners_ptr + place, mask=block < blocks, other=LAST_ID)
    first = tl.min(tl.where(height == tl.max(height, 0), winner, LAST_ID), 0)
    is_finite = tl.abs(tl.load(best_ptr + row)) < float("inf")
    tl.store(ids_ptr + row, tl.where(is_finite, first, NO_ID).to(tl.int64))


def sample_by_triton(logits: Tensor, params: DeviceSampling, out: Tensor) -> None:
    """See ``trellis.runtime.kernels.sampling.sample_on_device``. Three launches, whatever is asked for."""
    rows, vocab = logits.shape
    best = logits.new_empty(rows)
    cuts = torch.empty((rows, 2), dtype=torch.int32, device=logits.device)
    find_limits[(rows,)](
        logits,
        logits.stride(0),
        params.temperatures,
        params.top_ks,
        params.top_ps,
        best,
        cuts,
        VOCAB=vocab,
        BLOCK=min(LIMIT_BLOCK, power_of_two(vocab)),
        num_warps=16,
    )
    blocks = triton.cdiv(vocab, RACE_BLOCK)
    heights = logits.new_empty((rows, blocks))
    winners = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    race_blocks[(rows, blocks)](
        logits,
        logits.stride(0),
        params.temperatures,
        params.top_ks,
        params.min_ps,
        params.seeds,
        params.steps,
        best,
        cuts,
        heights,
        winners,
        vocab,
        BLOCK=RACE_BLOCK,
        num_warps=8,
    )
    join_blocks[(rows,)](heights, winners, best, out, blocks, BLOCK=power_of_two(blocks))
