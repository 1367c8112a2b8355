"""Which runs of slots several sequences of a batch read together, and the levels that are made of it.

Requests that came through the same node of the radix tree have the same slots there. In a cascade the keys of such a run
are read once for the queries of all its sequences; what each goes on with is read at another level, and the results of the
levels are merged by their sums of exponentials. Source: Ye et al. 2024, https://flashinfer.ai/2024/02/02/cascade-inference.html;
grouping level by level, as ``runtime/native/src/batch.h`` does it on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trellis.runtime.attention.paged_layout import PagedLayout, indptr_of, pages_of, sequence_bounds
from trellis.runtime.executor.batch import FlatBatch
from trellis.runtime.executor.contract import IntArray


@dataclass(frozen=True)
class CascadeRule:
    """When a cascade pays. levels: most of them, the sequences' own included; each one costs a merge of all results.
    min_keys: the shortest run that is read together. min_saved: the least share of all keys that need not be read again."""

    levels: int = 2
    min_keys: int = 256
    min_saved: float = 0.25


@dataclass(frozen=True)
class SharedRun:
    """Sequences (ascending) whose slots are the same at places begin .. end - 1, and in which no new token lies."""

    members: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Cascade:
    """levels: the shared ones, then each sequence's own, which alone is causal. The queries of all of them are the batch's
    rows in the order ``rows`` (int64 [T]), or as they are where it is None; a sequence with no share in a level has no
    keys there. keys_read: keys of all levels. keys_apart: keys that the sequences would read one by one."""

    levels: tuple[PagedLayout, ...]
    rows: np.ndarray | None
    keys_read: int
    keys_apart: int


def plan_cascade(batch: FlatBatch, page_size: int, rule: CascadeRule) -> Cascade | None:
    """None where it does not pay. Raises MisalignedPages as ``lay_out`` does."""
    runs = shared_runs(batch, page_size, rule)
    apart = int((batch.starts + batch.lengths).sum())
    saved = sum((len(run.members) - 1) * (run.end - run.begin) for run in runs)
    if not runs or saved < rule.min_saved * apart:
        return None
    paths: list[list[SharedRun]] = [[] for _ in batch.lengths]
    for run in runs:  # a run comes before those that go on from it
        for member in run.members:
            paths[member].append(run)
    # The members of a run have its first member in their keys where others have themselves, so they stand together, and
    # sequences that stand together already stay where they are.
    order = sorted(range(len(paths)), key=lambda e: (*(run.members[0] for run in paths[e]), e))
    depth = max(map(len, paths))
    levels = [_shared_level(batch, paths, order, level, page_size) for level in range(depth)]
    rows = None if order == list(range(len(order))) else _rows_of(batch, order)
    return Cascade((*levels, _own_level(batch, paths, order, page_size)), rows, apart - saved, apart)


def shared_runs(batch: FlatBatch, page_size: int, rule: CascadeRule) -> list[SharedRun]:
    """Runs of whole pages, at most ``rule.levels - 1`` deep; a run comes before those that go on from it."""
    runs: list[SharedRun] = []
    sequences = np.split(batch.slots, sequence_bounds(batch)[1:-1])
    open_groups = [(tuple(range(len(sequences))), 0)]
    for _ in range(rule.levels - 1):
        found = [
            SharedRun(tuple(sorted(members)), begin, end)
            for group, begin in open_groups
            for members, end in _grouped(group, begin, sequences, batch.starts, page_size, rule.min_keys)
        ]
        runs += found
        open_groups = [(run.members, run.end) for run in found]
    return runs


def _grouped(
    members: Sequence[int],
    begin: int,
    sequences: Sequence[IntArray],
    starts: IntArray,
    page_size: int,
    min_keys: int,
) -> list[tuple[list[int], int]]:
    """Those of ``members`` that go on together from ``begin``, and until where: at least ``min_keys`` keys."""
    by_slot: dict[int, list[int]] = {}
    for e in members:
        if starts[e] - begin >= min_keys:
            by_slot.setdefault(int(sequences[e][begin]), []).append(e)
    groups = []
    for alike in by_slot.values():
        group, end = alike[:1], int(starts[alike[0]])
        for e in alike[1:]:
            shared = begin + _common(sequences[group[0]][begin:end], sequences[e][begin : starts[e]])
            shared -= shared % page_size
            if shared - begin >= min_keys:
                group.append(e)
                end = shared
        if len(group) > 1:
            groups.append((group, end))
    return groups


def _common(a: IntArray, b: IntArray) -> int:
    """How many slots two sequences have in common from their beginning."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _shared_level(
    batch: FlatBatch, paths: Sequence[Sequence[SharedRun]], order: Sequence[int], level: int, page_size: int
) -> PagedLayout:
    """Neighbours in the same run, or in none, are one sequence of this level."""
    bounds = sequence_bounds(batch)
    runs: list[SharedRun | None] = []
    queries: list[int] = []
    for e in order:
        run = paths[e][level] if level < len(paths[e]) else None
        if runs and run is runs[-1]:
            queries[-1] += int(batch.lengths[e])
        else:
            runs.append(run)
            queries.append(int(batch.lengths[e]))
    pieces = [
        batch.slots[:0] if run is None else batch.slots[bounds[run.members[0]] :][run.begin : run.end]
        for run in runs
    ]
    return _pages(pieces, queries, page_size)


def _own_level(
    batch: FlatBatch, paths: Sequence[Sequence[SharedRun]], order: Sequence[int], page_size: int
) -> PagedLayout:
    bounds = sequence_bounds(batch)
    pieces = [batch.slots[bounds[e] + (paths[e][-1].end if paths[e] else 0) : bounds[e + 1]] for e in order]
    return _pages(pieces, [int(batch.lengths[e]) for e in order], page_size)


def _pages(pieces: Sequence[IntArray], queries: Sequence[int], page_size: int) -> PagedLayout:
    lengths = np.array([len(piece) for piece in pieces], np.int32)
    return pages_of(
        indptr_of(lengths), np.concatenate(pieces), indptr_of(np.array(queries, np.int32)), page_size
    )


def _rows_of(batch: FlatBatch, order: Sequence[int]) -> np.ndarray:
    """The batch's rows, sequence by sequence in that order: int64 [T]."""
    first = indptr_of(batch.lengths)
    return np.concatenate([np.arange(first[e], first[e + 1], dtype=np.int64) for e in order])
