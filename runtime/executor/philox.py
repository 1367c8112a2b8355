"""Random numbers that are a function of (seed, step) alone, so that a text does not depend on its batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WORD = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
ROUNDS = 10

UInt64Array = npt.NDArray[np.uint64]


def philox4x32(key: tuple[UInt64Array, UInt64Array], counter: list[UInt64Array]) -> list[UInt64Array]:
    """Philox-4x32-10 on whole arrays: two key words and four counter words → four random words.

    Words are 32 bits, held in uint64 so that products keep their high half.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    k0, k1 = key
    x0, x1, x2, x3 = counter
    for _ in range(ROUNDS):
        first, second = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        x0, x1, x2, x3 = (second >> HALF) ^ x1 ^ k0, second & WORD, (first >> HALF) ^ x3 ^ k1, first & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return [x0, x1, x2, x3]


def uniforms(seeds: list[int], steps: list[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each pair, 53 bits. Seeds are taken modulo 2**64."""
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], np.uint64)
    step = np.array(steps, np.uint64)
    zero = np.zeros_like(step)
    high, low, _, _ = philox4x32((seed & WORD, seed >> HALF), [step & WORD, step >> HALF, zero, zero])
    bits = ((high << HALF) | low) >> np.uint64(11)
    uniform: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return uniform
