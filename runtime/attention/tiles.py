"""What one launch of ``trellis.runtime.kernels.paged_attention`` computes, told as tables of int32.

An *item* is a tile of rows against a span of keys, or against a piece of that span. With G = heads that share a key head,
row r of an extend is its token r // G and the head r % G of the group; a tile is ``height`` rows from ``first_row`` on.

    item   0 first_token  row of the extend's first token in the batch
           1 first_row    of the tile, in the extend
           2 n_rows       of the extend: tokens * G
           3 start        position of the extend's first token
           4 base         where the sequence's slots begin in the table of slots
           5 begin        first key
           6 end          one past the last key; padding where begin == end
           7 piece        where to put what is found, to be merged; -1 where the item is the whole span

    merge  0 first_token, 1 first_row, 2 n_rows, as above; 3 the first piece; 4 how many; padding where there are none

Items come longest first, so that the last ones to start are short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trellis.runtime.attention.paged_layout import indptr_of, sequence_bounds, token_places
from trellis.runtime.executor.batch import FlatBatch
from trellis.runtime.executor.contract import IntArray


@dataclass(frozen=True)
class Work:
    """items: int32 [n, 8]. merges: int32 [m, 5]."""

    items: IntArray
    merges: IntArray


@dataclass(frozen=True)
class Split:
    """How spans are cut: into at most ``budget`` pieces, none shorter than ``least`` keys but for a span's last, in
    multiples of ``block`` keys."""

    budget: int
    least: int
    block: int


def by_height(lengths: IntArray, group: int, heights: Sequence[int]) -> list[tuple[int, IntArray]]:
    """(index of a height, the extends whose tiles have it), for those heights that have any. An extend gets the least
    height that all its rows fit in, or the greatest. heights: ascending."""
    rows = lengths * group
    chosen = np.minimum(np.searchsorted(heights, rows), len(heights) - 1)
    return [(int(index), np.flatnonzero(chosen == index).astype(np.int32)) for index in np.unique(chosen)]


def cut(
    batch: FlatBatch, extends: IntArray, group: int, height: int, window: int | None, split: Split
) -> Work:
    """The items of these extends. window: see ``AttentionShape``."""
    spans = tile_spans(batch, extends, group, height, window)
    lengths = spans[:, 6] - spans[:, 5]
    size = piece_sizes(lengths, split)
    counts = -(-lengths // size)
    cut_up = counts > 1
    first_piece = np.where(cut_up, indptr_of(np.where(cut_up, counts, 0))[:-1], -1)
    owner, nth = np.repeat(np.arange(len(spans)), counts), token_places(counts)
    items = spans[owner]
    items[:, 5] += nth * size[owner]
    items[:, 6] = np.minimum(items[:, 5] + size[owner], items[:, 6])
    items[:, 7] = np.where(cut_up[owner], first_piece[owner] + nth, -1)
    longest_first = np.argsort(items[:, 5] - items[:, 6], kind="stable")
    merges = np.column_stack([spans[:, :3], first_piece, counts])[cut_up]
    return Work(items[longest_first], merges.astype(np.int32))


def tile_spans(batch: FlatBatch, extends: IntArray, group: int, height: int, window: int | None) -> IntArray:
    """Items that are not cut: the keys that some row of the tile sees."""
    n_rows = batch.lengths[extends] * group
    counts = -(-n_rows // height)
    owner, first_row = np.repeat(extends, counts), token_places(counts) * height
    rows, start = np.repeat(n_rows, counts), batch.starts[owner]
    last_token = (np.minimum(first_row + height, rows) - 1) // group
    begin = np.zeros_like(start)
    if window is not None:
        begin = np.maximum(start + first_row // group - window + 1, 0)
    first_token, base = indptr_of(batch.lengths)[owner], sequence_bounds(batch)[owner]
    whole = np.full_like(start, -1)
    fields = (first_token, first_row, rows, start, base, begin, start + last_token + 1, whole)
    return np.column_stack(fields).astype(np.int32)


def piece_sizes(lengths: IntArray, split: Split) -> IntArray:
    """Keys of a piece of each span. Each span gets its share of the budget, rounded down, and is cut into nearly equal pieces;
    so all spans that are cut have no more pieces than the budget says."""
    wide = lengths.astype(np.int64)
    share = np.minimum(wide * split.budget // wide.sum(), wide // split.least)
    counts = np.maximum(share, 1)
    sizes: IntArray = (-(-wide // (counts * split.block)) * split.block).astype(np.int32)
    return sizes


def padded(work: Work, items: int, merges: int) -> Work:
    """The same with so many items and merges, of which some are padding."""
    return Work(_padded(work.items, items), _padded(work.merges, merges))


def _padded(table: IntArray, rows: int) -> IntArray:
    if len(table) > rows:
        raise ValueError(f"{len(table)} rows do not fit in a table of {rows}")
    wide: IntArray = np.zeros((rows, table.shape[1]), np.int32)
    wide[: len(table)] = table
    return wide
