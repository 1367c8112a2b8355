"""A batch goes to the device in one copy, and is the same batch there."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from cuda_fakes import FakeDevice, extend
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis.runtime.cuda.staging import ALIGNMENT, Staging, layout, send_together
from trellis.runtime.cuda.tokens import TokenTable
from trellis.runtime.executor.batch import Arrays, pack


@st.composite
def batches(draw):
    extends = []
    for _ in range(draw(st.integers(1, 5))):
        count, start = draw(st.integers(1, 6)), draw(st.integers(0, 9))
        tokens = draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))
        slots = draw(st.lists(st.integers(1, 500), min_size=start + count, max_size=start + count))
        extends.append(extend(tokens, start, slots, draw(st.integers(0, count))))
    return extends


@given(batches())
@settings(max_examples=60, deadline=None)
def test_a_staged_batch_is_the_packed_one_in_one_copy(extends):
    device = FakeDevice()
    staged = Staging(device).batch(extends)
    plain = pack(extends, device.where)
    for name in Arrays._fields:
        got, want = getattr(staged.batch, name), getattr(plain, name)
        assert got.dtype == want.dtype, name
        assert torch.equal(got, want), name
        assert got.data_ptr() % 16 == 0 or not len(got), name
    assert staged.follows is None
    assert device.log == ["pinned"]


def test_the_extents_of_a_batch_are_those_of_its_extends():
    batch = Staging(FakeDevice()).batch([extend([5, 6], 1, [7, 8, 9]), extend([4], 0, [3])]).batch
    assert [(e.offset, e.length, e.start, e.slots.tolist()) for e in batch.extents] == [
        (0, 2, 1, [7, 8, 9]),
        (2, 1, 0, [3]),
    ]
    assert len(batch) == 2


def test_tokens_that_follow_are_filled_in_from_the_table():
    device = FakeDevice()
    table = TokenTable(8, device.where)
    assert list(table.put(torch.tensor([31, 32, -1]))) == [0, 1, 2]
    extends = [
        extend([9, 9, 9], 0, [1, 2, 3]),
        extend([0], 4, [4, 5, 6, 7, 8], follows=1),
        extend([0], 0, [9], follows=2),  # nothing possible was sampled: any token will do
    ]
    staged = Staging(device).batch(extends)
    assert staged.follows is not None
    assert table.fill_in(staged.batch.token_ids, staged.follows).tolist() == [9, 9, 9, 32, 0]


def test_a_step_that_samples_more_than_the_table_holds_is_refused():
    with pytest.raises(ValueError, match="9 tokens were sampled in one step; the table holds 8"):
        TokenTable(8, torch.device("cpu")).put(torch.zeros(9, dtype=torch.int64))


def test_tensors_of_any_types_travel_together():
    device = FakeDevice()
    tensors = [
        torch.arange(3, dtype=torch.int64),
        torch.tensor([0.5, -2.0]),
        torch.tensor([[1.0, 1e-300]], dtype=torch.float64),
        torch.arange(100, dtype=torch.int32),
        torch.tensor([True, False, True]),
    ]
    for got, want in zip(send_together(tensors, device), tensors, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    assert device.log == ["pinned"]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8))
def test_parts_lie_one_after_the_other_and_aligned(lengths):
    places = layout(lengths)
    assert [place.stop - place.start for place in places] == lengths
    assert all(place.start % ALIGNMENT == 0 for place in places)
    assert all(a.stop <= b.start < a.stop + ALIGNMENT for a, b in pairwise(places))


def test_a_contradictory_extend_is_refused_as_when_packed():
    with pytest.raises(ValueError, match="extend 0"):
        Staging(FakeDevice()).batch([extend([1], 5, [1, 2])])
