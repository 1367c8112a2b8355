"""Masks by row index against the host's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis.runtime.executor.adjust import adjust
from trellis.runtime.executor.contract import SampleRow
from trellis.runtime.kernels.masks import mask_by_triton
from trellis.runtime.kernels.sampling import mask_by_torch, mask_on_device
from trellis.runtime.messages import SamplingParams

COVERS = ("masks",)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
BY = {"triton": mask_by_triton, "torch": mask_by_torch}


def masked_on_host(logits: torch.Tensor, words: torch.Tensor, mask_of_row: list[int]) -> torch.Tensor:
    rows = [
        SampleRow(i, SamplingParams(), 0, 0, mask=None if m < 0 else words[m].numpy())
        for i, m in enumerate(mask_of_row)
    ]
    changed = logits.clone()
    adjust(changed, rows)
    return changed


@pytest.mark.parametrize("by", BY)
@settings(max_examples=15)
@given(
    vocab=st.sampled_from([1, 31, 32, 33, 1000, 2048, 4100]),
    masks=st.integers(1, 4),
    data=st.data(),
)
def test_rows_are_masked_as_on_the_host(by, vocab, masks, data, device):
    mask_of_row = data.draw(st.lists(st.integers(-1, masks - 1), min_size=1, max_size=6))
    rng = np.random.default_rng(vocab * masks + len(mask_of_row))
    words = rng.integers(-(2**31), 2**31, (masks, (vocab + 31) // 32 + masks % 2), np.int32)
    words = torch.from_numpy(words)
    logits = torch.from_numpy(rng.standard_normal((len(mask_of_row), vocab), np.float32))
    want = masked_on_host(logits, words, mask_of_row)
    index = torch.tensor(mask_of_row, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    wide = torch.full((len(logits), vocab + 3), 7.0)  # rows with a gap after each
    wide[:, :vocab] = logits
    wide = wide.to(device)
    BY[by](wide[:, :vocab], words.to(device), index.to(device))
    assert torch.equal(wide[:, :vocab].cpu(), want)
    assert (wide[:, vocab:] == 7).all()


@pytest.mark.parametrize("by", BY)
def test_a_broken_row_stays_broken(by, device):
    logits = torch.tensor([[math.nan, 1.0, math.inf]], device=device)
    BY[by](
        logits,
        torch.zeros((1, 1), dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    assert logits[0].isnan().tolist() == [True, False, True]


def test_masks_that_are_too_short_are_refused(device):
    index = torch.zeros(2, dtype=torch.int32, device=device)
    words = torch.zeros((1, 3), dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="masks of 3 words do not cover 97 tokens"):
        mask_on_device(torch.zeros((2, 97), device=device), words, index)
    with pytest.raises(ValueError, match="float32"):
        mask_on_device(torch.zeros((2, 97), device=device, dtype=torch.bfloat16), words, index)
    logits = torch.zeros((2, 96), device=device)
    mask_on_device(logits, words, index)
    assert logits.isneginf().all()
