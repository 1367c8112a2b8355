"""The native greedy choice against the sampler's."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from trellis.runtime.executor import ModelRunner
from trellis.runtime.executor.contract import NO_TOKEN, Extend, SampleRow
from trellis.runtime.executor.sampler import is_plain, sample
from trellis.runtime.messages import SamplingParams
from trellis.runtime.native.greedy import best_tokens

ODD = (math.nan, math.inf, -math.inf, None)
GREEDY = SamplingParams(temperature=0.0)


def mask_of(allowed: np.ndarray) -> np.ndarray:
    bits = np.zeros(-(-len(allowed) // 32) * 32, np.uint8)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    vocab=st.integers(1, 150),
    rows=st.integers(1, 4),
    density=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    odd=st.sampled_from(ODD),
    seed=st.integers(0, 2**31),
)
def test_equals_the_sampler(library, vocab, rows, density, odd, seed):
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.integers(-3, 4, (rows, vocab)).astype(np.float32))  # many ties
    if odd is not None:
        logits[random.integers(rows), random.integers(vocab)] = odd
    asked = []
    for i in random.permutation(rows).tolist():
        mask = mask_of(random.random(vocab) < density) if random.random() < 0.8 else None
        asked.append(SampleRow(i, GREEDY, seed=0, step=0, mask=mask))
    want = sample(logits[[row.row for row in asked]], asked).token_ids
    got = best_tokens(library, logits, asked)
    for row, ours, theirs in zip(asked, got, want, strict=True):
        if row.mask is not None and odd in ODD[:2] and ours != theirs:
            # A masked one: the sampler adds -inf to it, which gives NaN; the native choice does not look at it.
            assert theirs == NO_TOKEN
            continue
        assert ours == theirs


def test_a_short_mask_and_a_missing_row_are_refused(library):
    logits = torch.zeros(2, 70)
    with pytest.raises(ValueError, match="a mask of 2 words does not cover 70 tokens"):
        best_tokens(library, logits, [SampleRow(0, GREEDY, 0, 0, mask=np.zeros(2, np.int32))])
    with pytest.raises(IndexError, match="row 2 of 2"):
        best_tokens(library, logits, [SampleRow(2, GREEDY, 0, 0)])


def test_what_is_plain():
    assert is_plain(SampleRow(0, GREEDY, 0, 0, mask=np.zeros(2, np.int32)))
    assert is_plain(SampleRow(0, SamplingParams(temperature=1.0, top_k=1), 0, 0))
    assert not is_plain(SampleRow(0, SamplingParams(temperature=1.0), 0, 0))
    assert not is_plain(SampleRow(0, GREEDY, 0, 0, forbidden=[3]))
    assert not is_plain(SampleRow(0, GREEDY, 0, 0, want_logprob=True))
    assert not is_plain(SampleRow(0, GREEDY, 0, 0, top_logprobs_num=2))
    assert not is_plain(SampleRow(0, GREEDY, 0, 0, history=np.zeros(2, np.int32)))
    assert not is_plain(SampleRow(0, SamplingParams(temperature=0.0, logit_bias={3: 1.0}), 0, 0))


def test_a_runner_chooses_the_same_with_and_without_reports(tiny_model):
    runner = ModelRunner(tiny_model, 64)
    extends = [
        Extend(np.array([i, 2 * i + 1], np.int32), 0, np.arange(1 + 2 * i, 3 + 2 * i, dtype=np.int32), 1)
        for i in range(5)
    ]
    logits = runner.forward(extends)
    plain = [SampleRow(i, GREEDY, 0, 0) for i in (3, 0, 4)]
    reported = [SampleRow(i, GREEDY, 0, 0, want_logprob=True) for i in (3, 0, 4)]
    ours, theirs = runner.sample(logits, plain), runner.sample(logits, reported)
    assert ours.token_ids == theirs.token_ids
    assert ours.logprobs == ours.top == [None] * 3
    assert runner.sample(logits, []).token_ids == []
