"""Scoring options after a prompt: which sequences are computed for it, and what their log-probabilities say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from trellis.runtime.manager.types import GenerateInput, GenerateResult, OptionScore, ScoreOutput
from trellis.runtime.messages import Counts, SamplingParams


class Scored(NamedTuple):
    """ids[start:] are scored. The first ``shared`` of these have the log-probabilities that they have in sequence
    number ``like``, so that what many options begin with is scored once."""

    ids: list[int]
    start: int
    shared: int
    like: int

    @property
    def first(self) -> int:
        """From here on its own log-probabilities are wanted."""
        return self.start + self.shared


def scored(sequences: Sequence[list[int]], start: int, before: Sequence[int] | None = None) -> list[Scored]:
    """What to compute for options whose own tokens are ids[start:]. before: what stands before any text; if given,
    each option's own tokens are scored after that alone, too, and the second half of the list is that."""
    found = _shared(sequences, start, 0)
    if before is not None:
        alone = [[*before, *ids[start:]] for ids in sequences]
        found += _shared(alone, len(before), len(sequences))
    return found


def _shared(sequences: Sequence[list[int]], start: int, offset: int) -> list[Scored]:
    """In lexicographic order every sequence shares the most with the one before it. offset: number of the first."""
    found: list[Scored] = [Scored(ids, start, 0, offset) for ids in sequences]
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    for previous, index in pairwise(order):
        a, b = sequences[previous], sequences[index]
        length = min(len(a), len(b))
        end = next((i for i in range(start, length) if a[i] != b[i]), length)
        found[index] = Scored(b, start, end - start, offset + previous)
    return found


def score_inputs(wanted: Sequence[Scored], namespace: str) -> list[GenerateInput]:
    """A request each, of those that have anything to score."""
    return [
        GenerateInput(
            prompt=each.ids,
            params=SamplingParams(max_new_tokens=0, temperature=0.0),
            logprob_start=each.first,
            namespace=namespace,
            prompt_field="options",
            params_checked=True,
        )
        for each in wanted
        if len(each.ids) > each.first
    ]


def score_output(wanted: Sequence[Scored], options: int, results: Sequence[GenerateResult]) -> ScoreOutput:
    """Put the results of ``score_inputs`` together in the order of the options; those with nothing to score have
    none. A first token that nothing at all stands before gets 0."""
    remaining = iter(results)
    own = [
        [0.0 if value is None else value for value in next(remaining).input_logprobs or []]
        if len(each.ids) > each.first
        else []
        for each in wanted
    ]
    rows: list[list[float]] = [[] for _ in wanted]
    for index in sorted(range(len(wanted)), key=lambda i: (i >= options, wanted[i].ids)):
        each = wanted[index]
        rows[index] = [*rows[each.like][: each.shared], *own[index]]
    found = [
        OptionScore(each.ids[each.start :], rows[i], rows[options + i] if len(rows) > options else None)
        for i, each in enumerate(wanted[:options])
    ]
    totals = {name: sum(getattr(r.counts, name) for r in results) for name in Counts.__struct_fields__}
    return ScoreOutput(found, Counts(**totals))
