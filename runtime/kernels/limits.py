"""Where top-k, top-p and min-p cut the vocabulary, without sorting it (Triton).

A token's key is the bit pattern of its distance from the best logit, (best - logit) / temperature. Distances are not
negative, so their patterns are ordered as they are, as integers: 0 for the best token, 0x7F800000 for one at -inf. A cut is
a key: tokens below it stay, those on it stay as far as they are among the first, by id, and the others go. It is found by
bisection: a pass over the row says how much lies below a pivot and which keys are next to it on both sides, so that at most
31 passes, and in practice about a dozen, leave a single key. Shares of probability are added as integers in units of
2^-60: exactly, and so in any order with the same result.

What is kept is what ``filter_ordered`` of ``trellis.runtime.executor.sampler`` keeps of a stably sorted row.
"""

from __future__ import annotations

import triton
import triton.language as tl

WHOLE = tl.constexpr(1 << 60)  # a probability of 1
NOTHING = tl.constexpr(0x7F800000)  # the key of a token at -inf


@triton.jit
def distances(row_ptr, token, vocab, best, temperature):
    """(best - logit) / temperature, inf past the end. The division is rounded as the CPU's, or ties would differ."""
    logit = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
    return tl.abs(tl.div_rn(logit - best, temperature))


@triton.jit
def parts(probability):
    """Of float32 probabilities, in units of 2^-60: int64."""
    return (probability * WHOLE).to(tl.int64)


@triton.jit
def parts_on(key, log_total):
    """Of the probability of a token with this key."""
    return parts(tl.exp(-key.to(tl.float32, bitcast=True) - log_total))


@triton.jit
def split(
    row_ptr,
    best,
    temperature,
    log_total,
    pivot,
    BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How much lies below the pivot (tokens, or their probability), the largest key below it, the smallest that is not."""
    amount = tl.zeros([BLOCK], tl.int64)
    under = tl.full([BLOCK], -1, tl.int32)
    over = tl.full([BLOCK], NOTHING, tl.int32)
    for start in tl.range(0, VOCAB, BLOCK):
        distance = distances(row_ptr, start + tl.arange(0, BLOCK), VOCAB, best, temperature)
        key = distance.to(tl.int32, bitcast=True)
        below = key < pivot
        if BY_MASS:
            amount += tl.where(below, parts(tl.exp(-distance - log_total)), 0)
        else:
            amount += below.to(tl.int64)
        under = tl.maximum(under, tl.where(below, key, -1))
        over = tl.minimum(over, tl.where(below, NOTHING, key))
    return tl.sum(amount, 0), tl.max(under, 0), tl.min(over, 0)


@triton.jit
def find_cut(
    row_ptr,
    best,
    temperature,
    log_total,
    limit,
    BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest key below which there is less than the limit (int64, at least 1), and how much there is."""
    low = tl.full((), 0, tl.int32)  # below it there is less
    high = tl.full((), NOTHING + 1, tl.int32)  # below it there is not
    below_low = tl.full((), 0, tl.int64)
    while low + 1 < high:
        pivot = low + (high - low) // 2
        amount, under, over = split(
            row_ptr, best, temperature, log_total, pivot, BY_MASS=BY_MASS, VOCAB=VOCAB, BLOCK=BLOCK
        )
        is_less = amount < limit
        # No key lies between the pivot and its neighbours, so the bounds may go there at once.
        low = tl.where(is_less, over, low)
        below_low = tl.where(is_less, amount, below_low)
        high = tl.where(is_less, high, under + 1)
    return low, below_low


@triton.jit
def end_of_ties(row_ptr, best, temperature, cut, ties, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The id after that of the last of the first ``ties`` tokens on the cut."""
    seen = tl.full((), 0, tl.int64)
    end = tl.full((), 0, tl.int32)
    for start in tl.range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        key = distances(row_ptr, token, VOCAB, best, temperature).to(tl.int32, bitcast=True)
        equal = ((key == cut) & (token < VOCAB)).to(tl.int32)
        rank = seen + tl.cumsum(equal, 0)
        end = tl.maximum(end, tl.max(tl.where((equal != 0) & (rank <= ties), token + 1, 0), 0))
        seen += tl.sum(equal, 0)
    return end


@triton.jit
def best_logit(row_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """inf where there is a NaN."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + token, mask=token < VOCAB, other=float("-inf"))
        best = tl.maximum(best, tl.where(logit == logit, logit, float("inf")))
    return tl.max(best, 0)


@triton.jit
def log_of_sum(row_ptr, best, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The logarithm of the sum of exp(-distance)."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, VOCAB, BLOCK):
        total += tl.exp(-distances(row_ptr, start + tl.arange(0, BLOCK), VOCAB, best, temperature))
    return tl.log(tl.sum(total, 0))


@triton.jit
def find_limits(
    logits_ptr,
    row_stride,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    best_ptr,
    cuts_ptr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (rows,). logits: float32 [N, vocab], rows ``row_stride`` apart; temperatures: float32 [N]; top_ks: int32 [N];
    top_ps: float64 [N]. Written: best: float32 [N], inf or -inf where there is no finite best; cuts: int32 [N, 2], the key
    of the cut and the first id that goes of those on it."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    best = best_logit(row_ptr, VOCAB=VOCAB, BLOCK=BLOCK)
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(top_ks_ptr + row).to(tl.int64)
    top_p = tl.load(top_ps_ptr + row)
    by_rank = (top_k > 0) & (top_k < VOCAB)
    by_mass = top_p < 1.0
    cut = tl.full((), NOTHING, tl.int32)
    end = tl.full((), 0, tl.int32)
    ties = tl.full((), 0, tl.int64)
    if (temperature > 0) & (top_k != 1) & (tl.abs(best) < float("inf")) & (by_rank | by_mass):
        if by_rank:
            cut, below = find_cut(
                row_ptr, best, temperature, 0.0, top_k, BY_MASS=False, VOCAB=VOCAB, BLOCK=BLOCK
            )
            ties = top_k - below
        if by_mass:
            log_total = log_of_sum(row_ptr, best, temperature, VOCAB=VOCAB, BLOCK=BLOCK)
            mass = tl.full((), WHOLE, tl.int64)
            if by_rank:  # top-p is a share of what top-k left
                mass, _, _ = split(
                    row_ptr, best, temperature, log_total, cut, BY_MASS=True, VOCAB=VOCAB, BLOCK=BLOCK
                )
                mass += ties * parts_on(cut, log_total)
            limit = tl.maximum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), 1)
            cut, below = find_cut(
                row_ptr, best, temperature, log_total, limit, BY_MASS=True, VOCAB=VOCAB, BLOCK=BLOCK
            )
            each = tl.maximum(parts_on(cut, log_total), 1)
            ties = (limit - below + each - 1) // each
        end = end_of_ties(row_ptr, best, temperature, cut, ties, VOCAB=VOCAB, BLOCK=BLOCK)
    tl.store(best_ptr + row, best)
    tl.store(cuts_ptr + 2 * row, cut)
    tl.store(cuts_ptr + 2 * row + 1, end)
