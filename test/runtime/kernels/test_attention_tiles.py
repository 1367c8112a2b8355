"""The tables of the Triton attention: every row sees each key that it may see, once."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from trellis.runtime.attention.tiles import Split, by_height, cut, padded, tile_spans
from trellis.runtime.executor.batch import FlatBatch, flatten
from trellis.runtime.executor.contract import Extend


def flat(lengths: list[int], starts: list[int]) -> FlatBatch:
    return flatten(
        [
            Extend(np.zeros(n, np.int32), start, np.zeros(start + n, np.int32), n)
            for n, start in zip(lengths, starts, strict=True)
        ]
    )


def everything(batch: FlatBatch) -> np.ndarray:
    return np.arange(len(batch.lengths), dtype=np.int32)


extends = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=6)
splits = st.builds(Split, st.integers(1, 20), st.integers(1, 40), st.sampled_from([1, 8, 16]))


@given(extends, st.integers(1, 9), st.sampled_from([4, 16]), st.none() | st.integers(1, 60), splits)
def test_every_row_sees_each_of_its_keys_once(extends, group, height, window, split):
    batch = flat([n for n, _ in extends], [start for _, start in extends])
    work = cut(batch, everything(batch), group, height, window, split)
    total = len(batch.token_ids)
    seen = np.zeros((total * group, len(batch.slots)), int)
    for first_token, first_row, n_rows, start, base, begin, end, _ in work.items:
        for row in range(first_row, min(first_row + height, n_rows)):
            position = start + row // group
            first = 0 if window is None else max(0, position - window + 1)
            keys = slice(base + max(begin, first), base + max(begin, first, min(end, position + 1)))
            seen[first_token * group + row, keys] += 1
    wanted = np.zeros_like(seen)
    token, base = 0, 0
    for n, start in extends:
        for position in range(start, start + n):
            first = 0 if window is None else max(0, position - window + 1)
            wanted[token * group : (token + 1) * group, base + first : base + position + 1] = 1
            token += 1
        base += start + n
    assert np.array_equal(seen, wanted)


@given(extends, st.integers(1, 9), st.none() | st.integers(1, 60), splits)
def test_pieces_are_few_and_each_is_merged_once(extends, group, window, split):
    batch = flat([n for n, _ in extends], [start for _, start in extends])
    spans = tile_spans(batch, everything(batch), group, 16, window)
    work = cut(batch, everything(batch), group, 16, window, split)
    places = work.items[:, 7]
    n_pieces = int((places >= 0).sum())
    assert n_pieces <= split.budget
    assert len(work.items) <= len(spans) + split.budget
    assert sorted(places[places >= 0]) == list(range(n_pieces))
    merged: list[int] = []
    for first_token, first_row, n_rows, first_piece, pieces in work.merges:
        mine = work.items[(places >= first_piece) & (places < first_piece + pieces)]
        mine = mine[np.argsort(mine[:, 7])]
        assert pieces > 1
        assert (mine[:, :3] == (first_token, first_row, n_rows)).all()
        assert (mine[1:, 5] == mine[:-1, 6]).all()
        sizes = mine[:-1, 6] - mine[:-1, 5]
        assert (sizes >= split.least).all()
        assert (sizes % split.block == 0).all()
        merged += mine[:, 7].tolist()
    assert sorted(merged) == list(range(n_pieces))


def test_long_spans_come_first_and_only_they_are_cut():
    batch = flat([1, 1, 1], [9, 999, 199])
    work = cut(batch, everything(batch), 4, 16, None, Split(budget=5, least=64, block=16))
    lengths = work.items[:, 6] - work.items[:, 5]
    assert lengths.tolist() == [256, 256, 256, 232, 200, 10]
    assert work.items[:, 0].tolist() == [1, 1, 1, 1, 2, 0]
    assert work.items[:, 7].tolist() == [0, 1, 2, 3, -1, -1]
    assert work.merges.tolist() == [[1, 0, 4, 0, 4]]


def test_contexts_of_equal_length_are_not_cut_if_there_are_as_many_as_the_budget():
    batch = flat([1] * 8, [4000] * 8)
    assert not len(cut(batch, everything(batch), 4, 16, None, Split(8, 128, 64)).merges)
    assert len(cut(batch, everything(batch), 4, 16, None, Split(16, 128, 64)).merges) == 8


def test_tiles_skip_what_no_row_sees():
    """A prompt of 64 tokens in tiles of 32 rows, two heads a group: the first tile needs 16 keys, the last 64."""
    batch = flat([64], [0])
    assert tile_spans(batch, everything(batch), 2, 32, None)[:, 5:7].tolist() == [
        [0, 16],
        [0, 32],
        [0, 48],
        [0, 64],
    ]
    assert tile_spans(batch, everything(batch), 2, 32, 8)[:, 5:7].tolist() == [
        [0, 16],
        [9, 32],
        [25, 48],
        [41, 64],
    ]


def test_an_extend_gets_the_least_height_that_holds_it():
    lengths = np.array([1, 4, 5, 16, 17, 32, 33, 900], np.int32)
    found = by_height(lengths, 4, (16, 64, 128))
    assert [(which, rows.tolist()) for which, rows in found] == [(0, [0, 1]), (1, [2, 3]), (2, [4, 5, 6, 7])]


def test_tables_are_padded_with_what_is_skipped():
    batch = flat([1, 1], [600, 2])
    work = cut(batch, everything(batch), 1, 16, None, Split(4, 64, 16))
    wide = padded(work, 20, 9)
    assert (len(wide.items), len(wide.merges)) == (20, 9)
    assert np.array_equal(wide.items[: len(work.items)], work.items)
    assert not wide.items[len(work.items) :].any()
    assert not wide.merges[len(work.merges) :].any()
    with pytest.raises(ValueError, match=f"{len(work.items)} rows do not fit in a table of 2"):
        padded(work, 2, 9)
