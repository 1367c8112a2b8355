"""The tables of pages against the documented layout, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import extends_of, flat_batch

from trellis.runtime.attention.paged_layout import MisalignedPages, Tables, lay_out, view_as_pages
from trellis.runtime.executor.batch import flatten
from trellis.runtime.executor.contract import Extend

REQUESTS = st.lists(
    st.tuples(st.integers(-1, 1), st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6
)


@given(requests=REQUESTS, page_size=st.sampled_from([1, 2, 16]), seed=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_pages_hold_the_tokens_of_each_sequence_in_order(requests, page_size, seed):
    extends = extends_of(requests, shared=[32, 7], page_size=page_size, seed=seed)
    layout = lay_out(flatten(extends), page_size)
    assert layout.sequences == len(extends)
    for table in (layout.queries, layout.indptr, layout.indices, layout.last_page_len):
        assert table.dtype == np.int32
    for b, extend in enumerate(extends):
        assert layout.queries[b + 1] - layout.queries[b] == len(extend.token_ids)
        pages = layout.indices[layout.indptr[b] : layout.indptr[b + 1]]
        slots = (pages[:, None] * page_size + np.arange(page_size)).ravel()
        used = (len(pages) - 1) * page_size + layout.last_page_len[b]
        assert 1 <= layout.last_page_len[b] <= page_size
        assert slots[:used].tolist() == extend.slots.tolist()


@given(
    tokens=st.integers(1, 60),
    page_size=st.sampled_from([2, 16]),
    at=st.integers(0, 59),
    move=st.integers(1, 200),
)
@settings(max_examples=60, deadline=None)
def test_a_slot_out_of_its_page_is_refused(tokens, page_size, at, move):
    extend = extends_of([(-1, tokens - 1, 1)], page_size=page_size)[0]
    at %= tokens
    extend.slots[at] += move
    if at % page_size == 0 and tokens == at + 1 and move % page_size == 0:
        lay_out(flatten([extend]), page_size)  # its whole page moved: that is a page as well
        return
    with pytest.raises(MisalignedPages, match=r"sequence 0: its token \d+ is in slot \d+"):
        lay_out(flatten([extend]), page_size)


def test_slots_in_any_order_are_pages_of_one():
    extend = Extend(np.array([1], np.int32), 3, np.array([9, 2, 7, 5], np.int32), 0)
    layout = lay_out(flatten([extend]))
    assert layout.indices.tolist() == [9, 2, 7, 5]
    assert layout.last_page_len.tolist() == [1]
    with pytest.raises(MisalignedPages):
        lay_out(flatten([extend]), 2)


def test_the_sink_is_a_page_of_its_own_for_padding():
    """A padding request reads slot 0 alone, with pages of any size."""
    padding = Extend(np.array([0], np.int32), 0, np.array([0], np.int32), 0)
    for page_size in (1, 16):
        layout = lay_out(flatten([padding, padding]), page_size)
        assert layout.indices.tolist() == [0, 0]
        assert layout.last_page_len.tolist() == [1, 1]


def test_pages_are_the_same_memory():
    rows = torch.arange(35 * 2 * 3.0).view(35, 2, 3)
    pages = view_as_pages(rows, 16)
    assert pages.shape == (2, 16, 2, 3)
    assert pages.data_ptr() == rows.data_ptr()
    assert torch.equal(pages[1, 4], rows[20])


def test_tables_keep_what_is_planned_on_the_host():
    tables = Tables.of(lay_out(flat_batch([(-1, 4, 2), (-1, 0, 1)])), torch.device("cpu"))
    assert [t.dtype for t in (tables.queries, tables.indptr, tables.indices, tables.last_page_len)] == [
        torch.int32
    ] * 4
    assert tables.queries.tolist() == [0, 2, 3]
    assert tables.indptr.tolist() == [0, 6, 7]
