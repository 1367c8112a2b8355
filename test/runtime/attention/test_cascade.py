"""Shared runs of slots and the levels that are made of them: every key is read once by every query that may see it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import extends_of

from trellis.runtime.attention.cascade import CascadeRule, plan_cascade, shared_runs
from trellis.runtime.executor.batch import flatten
from trellis.runtime.executor.contract import Extend

EAGER = CascadeRule(levels=3, min_keys=4, min_saved=0.0)
REQUESTS = st.lists(
    st.tuples(st.integers(-1, 2), st.integers(0, 40), st.integers(1, 5)), min_size=1, max_size=9
)


def slots_of(level, segment):
    pages = level.indices[level.indptr[segment] : level.indptr[segment + 1]]
    slots = (pages[:, None] * level.page_size + np.arange(level.page_size)).ravel()
    return slots[: max(0, len(pages) - 1) * level.page_size + level.last_page_len[segment]].tolist()


@given(requests=REQUESTS, page_size=st.sampled_from([1, 4]), levels=st.integers(2, 3), seed=st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_levels_together_are_each_sequence(requests, page_size, levels, seed):
    extends = extends_of(requests, shared=[20, 36, 5], page_size=page_size, seed=seed)
    batch = flatten(extends)
    cascade = plan_cascade(batch, page_size, CascadeRule(levels, 4, 0.0))
    if cascade is None:
        assert not shared_runs(batch, page_size, CascadeRule(levels, 4, 0.0))
        return
    tokens = int(batch.lengths.sum())
    rows = np.arange(tokens) if cascade.rows is None else cascade.rows
    assert sorted(rows) == list(range(tokens))
    owner = np.repeat(np.arange(len(extends)), batch.lengths)
    read = 0
    found: list[list[int]] = [[] for _ in range(tokens)]
    for level in cascade.levels:
        assert level.queries[-1] == tokens
        for segment in range(level.sequences):
            slots = slots_of(level, segment)
            read += len(slots)
            for place in range(level.queries[segment], level.queries[segment + 1]):
                found[rows[place]] += slots
    for row in range(tokens):
        assert found[row] == extends[owner[row]].slots.tolist()
    assert read == cascade.keys_read
    assert cascade.keys_apart == sum(len(e.slots) for e in extends)
    own = cascade.levels[-1]
    for segment in range(own.sequences):  # causality is a matter of the last level alone
        place = own.queries[segment]
        assert own.queries[segment + 1] - place == len(extends[owner[rows[place]]].token_ids)
        assert len(slots_of(own, segment)) >= own.queries[segment + 1] - place


def test_members_that_stand_together_stay_where_they_are():
    rule = CascadeRule(2, 4, 0.0)
    together = flatten(extends_of([(-1, 3, 1), (0, 3, 1), (0, 1, 1), (-1, 2, 2)], shared=[32]))
    cascade = plan_cascade(together, 1, rule)
    assert cascade is not None
    assert cascade.rows is None
    assert [level.sequences for level in cascade.levels] == [3, 4]
    apart = flatten(extends_of([(0, 3, 1), (-1, 3, 2), (0, 1, 1)], shared=[32]))
    cascade = plan_cascade(apart, 1, rule)
    assert cascade is not None
    assert cascade.rows is not None
    assert cascade.rows.tolist() == [0, 3, 1, 2]


def test_a_tree_of_shared_runs_is_read_level_by_level():
    prefix, left, right = np.arange(1, 33), np.arange(40, 60), np.arange(70, 90)

    def request(middle, own):
        slots = np.concatenate([prefix, middle, [own]]).astype(np.int32)
        return Extend(np.array([1], np.int32), len(slots) - 1, slots, 0)

    batch = flatten([request(left, 100), request(left, 101), request(right, 102), request(right, 103)])
    runs = shared_runs(batch, 1, EAGER)
    assert [(run.members, run.begin, run.end) for run in runs] == [
        ((0, 1, 2, 3), 0, 32),
        ((0, 1), 32, 52),
        ((2, 3), 32, 52),
    ]
    cascade = plan_cascade(batch, 1, EAGER)
    assert cascade is not None
    assert [level.sequences for level in cascade.levels] == [1, 2, 4]
    assert cascade.keys_read == 32 + 2 * 20 + 4
    assert len(shared_runs(batch, 1, CascadeRule(2, 4, 0.0))) == 1


@pytest.mark.parametrize(
    ("rule", "pays"),
    [(CascadeRule(2, 32, 0.25), True), (CascadeRule(2, 33, 0.25), False), (CascadeRule(2, 32, 0.5), False)],
)
def test_a_cascade_must_save_enough(rule, pays):
    """Two of 32 shared keys and 8 more each: 32 of 80 keys are not read again."""
    batch = flatten(extends_of([(0, 7, 1), (0, 7, 1)], shared=[32]))
    assert (plan_cascade(batch, 1, rule) is not None) == pays


def test_new_tokens_are_in_no_shared_run():
    """A run ends before the first token that some member computes in this step, though others read it already."""
    slots = np.arange(1, 21, dtype=np.int32)
    computes = Extend(np.zeros(10, np.int32), 10, slots, 9)
    follows = Extend(np.zeros(1, np.int32), 20, np.append(slots, 30).astype(np.int32), 0)
    runs = shared_runs(flatten([computes, follows]), 1, EAGER)
    assert [(run.members, run.begin, run.end) for run in runs] == [((0, 1), 0, 10)]
