"""Random numbers that are a function of (seed, step, token) alone, so that a text does not depend on its batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GAMMA = np.uint64(0x9E3779B97F4A7C15)
MASK = 0xFFFFFFFFFFFFFFFF


def gumbel(seed: int, step: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """One standard Gumbel number for each token: float32, the shape of ``tokens``. seed: modulo 2**64.

    Token t gets number t of a SplitMix64 stream whose start is mixed from seed and step. About 10 ns a number.
    """
    start = _mixed(seed) + step * int(GAMMA)
    start = _mixed(start)
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64
        bits = mix(np.uint64(start) + (tokens.astype(np.uint64) + np.uint64(1)) * GAMMA)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # (0, 1)
    return (-np.log(-np.log(uniform))).astype(np.float32)


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of SplitMix64 on a whole array.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mixed(value: int) -> int:
    return int(mix(np.array([value & MASK], np.uint64))[0])
