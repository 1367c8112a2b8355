"""Quantised weights: the same integers on every instruction set, blocks of files as they are, small errors."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from quantized_oracle import GROUP, multiply, rounded_activations

FLOAT32 = 0
Q4_0, Q4_1, Q8_0, Q4_K = (GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K"))
FORMATS = {Q4_0: "q4", Q4_1: "q4", Q8_0: "q8", Q4_K: "q4"}


def whole_activations(random: np.random.Generator, rows: int, inputs: int) -> np.ndarray:
    """Integers that reach 127 in each group, times 1 or 2 by group: rounding keeps them, and float32 holds their sums."""
    x = random.integers(-127, 128, (rows, inputs // GROUP, GROUP))
    x[:, :, random.integers(GROUP)] = 127 * random.choice([-1, 1], x.shape[:2])
    return (x * random.choice([1, 2], (*x.shape[:2], 1))).reshape(rows, inputs).astype(np.float32)


def half_bytes(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).view(np.uint8)


def random_blocks(random: np.random.Generator, kind: int, outputs: int, inputs: int) -> np.ndarray:
    """Blocks of any integers, with scales of 1 and 1/2: uint8 [outputs, bytes]."""
    n = inputs // (256 if kind == Q4_K else 32)
    scale = half_bytes(random.choice([0.5, 1.0], (outputs, n, 1)))
    minimum = half_bytes(random.choice([-3.0, -1.5, 0.0, 2.0], (outputs, n, 1)))
    size = {Q4_0: 16, Q4_1: 16, Q8_0: 32, Q4_K: 140}[kind]
    integers = random.integers(0, 256, (outputs, n, size)).astype(np.uint8)
    parts = [scale, minimum, integers] if kind in (Q4_1, Q4_K) else [scale, integers]
    return np.concatenate(parts, -1).reshape(outputs, -1)


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 13, 31])
def test_sums_of_whole_numbers_are_exact(library, kind, rows):
    random = np.random.default_rng(rows)
    outputs, inputs = 75, 96
    blocks, x = random_blocks(random, kind, outputs, inputs), whole_activations(random, rows, inputs)
    weights = dequantize(blocks, kind).reshape(outputs, inputs)
    got = multiply(library, FORMATS[kind], kind, blocks, inputs, x)
    np.testing.assert_array_equal(got.weights, weights)
    np.testing.assert_array_equal(got.out, (x.astype(np.float64) @ weights.T.astype(np.float64)))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kept=st.sampled_from(["q4", "q8"]),
    outputs=st.integers(1, 90),
    inputs=st.integers(1, 200),
    rows=st.integers(1, 40),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_products_of_any_numbers(library, kept, outputs, inputs, rows, threads, seed):
    """By their definition, up to the rounding of float32 sums; also where the last group is not whole."""
    random = np.random.default_rng(seed)
    weights = (random.standard_normal((outputs, inputs)) * 10.0 ** random.integers(-3, 3)).astype(np.float32)
    x = (random.standard_normal((rows, inputs)) * 10.0 ** random.integers(-3, 3)).astype(np.float32)
    x[:, random.integers(inputs)] *= 1000
    got = multiply(library, kept, FLOAT32, weights, inputs, x, threads)
    rounded = rounded_activations(x).astype(np.float64)
    want = rounded @ got.weights.T.astype(np.float64)
    # A minimum and a scaled integer may be larger than the weight that they add up to, but not than the largest.
    room = 1e-5 * np.abs(rounded).sum(1)[:, None] * np.abs(got.weights).max(1) + 1e-30
    assert (np.abs(got.out - want) <= room).all()


@pytest.mark.parametrize("kept", ["q4", "q8"])
def test_a_row_does_not_depend_on_its_company(library, kept):
    """Bit by bit: alone, or in tiles of any height."""
    random = np.random.default_rng(5)
    weights = random.standard_normal((40, 128)).astype(np.float32)
    x = random.standard_normal((19, 128)).astype(np.float32)
    alone = [multiply(library, kept, FLOAT32, weights, 128, row[None]).out[0] for row in x]
    for rows in (2, 5, 8, 9, 19):
        got = multiply(library, kept, FLOAT32, weights, 128, x[:rows]).out
        np.testing.assert_array_equal(got, np.stack(alone[:rows]))


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0], ids=lambda kind: kind.name)
def test_blocks_of_a_file_are_kept_as_they_are(library, kind):
    weights = np.random.default_rng(1).standard_normal((70, 512)).astype(np.float32)
    blocks = quantize(weights, kind)
    got = multiply(library, FORMATS[kind], kind, blocks, 512, np.ones((1, 512), np.float32))
    np.testing.assert_array_equal(got.weights, dequantize(blocks, kind))


def test_blocks_of_q4_k_differ_by_the_rounding_of_their_scales(library):
    random = np.random.default_rng(2)
    blocks = random_blocks(random, Q4_K, 40, 512)
    want = dequantize(blocks, Q4_K).reshape(40, 512)
    got = multiply(library, "q4", Q4_K, blocks, 512, np.ones((1, 512), np.float32)).weights
    most = 63 * (15 * 1.0 + 3.0)  # of what scale and minimum contribute
    assert np.abs(got - want).max() <= most * 2.0**-11
    assert np.abs(want).max() > 100


def test_eight_bits_are_wrong_by_half_a_step_at_most(library):
    weights = np.random.default_rng(3).standard_normal((64, 320)).astype(np.float32)
    kept = multiply(library, "q8", FLOAT32, weights, 320, np.ones((1, 320), np.float32)).weights
    step = np.abs(weights.reshape(64, -1, GROUP)).max(-1, keepdims=True) / 127
    assert (
        np.abs(kept - weights).reshape(64, -1, GROUP) <= 0.57 * step
    ).all()  # 127 times the half's own rounding is 0.06


def test_four_bits_are_better_than_the_ends_of_each_group(library):
    """The usual quantiser takes the least and the largest weight of a group as the ends of its scale."""
    weights = np.random.default_rng(4).standard_normal((64, 320)).astype(np.float32)
    kept = multiply(library, "q4", FLOAT32, weights, 320, np.ones((1, 320), np.float32)).weights
    usual = dequantize(quantize(weights, Q4_1), Q4_1)
    assert np.square(kept - weights).mean() < 0.9 * np.square(usual - weights).mean()


@pytest.mark.parametrize("value", [0.0, -0.25, 3.5])
def test_a_group_of_equal_weights(library, value):
    weights = np.full((3, 64), value, np.float32)
    for kept in ("q8", "q4"):
        got = multiply(library, kept, FLOAT32, weights, 64, np.ones((2, 64), np.float32))
        np.testing.assert_allclose(got.weights, weights, rtol=5e-4)
        np.testing.assert_allclose(got.out, 64 * value, rtol=5e-4)


def test_blocks_of_another_format_are_refused(library):
    with pytest.raises(RuntimeError, match="blocks of another format"):
        multiply(library, "q4", Q8_0, np.zeros((4, 34), np.uint8), 32, np.ones((1, 32), np.float32))
