"""Scoring options: shared beginnings are asked for once, and every option gets its whole row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trellis.runtime.manager.scoring import score_inputs, score_output, scored
from trellis.runtime.manager.types import GenerateResult
from trellis.runtime.messages import Counts

PROMPT = [90, 91]
options = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12)


def logprob(ids: list[int], position: int) -> float | None:
    """A function of the token and all before it; the first token has none."""
    return None if position == 0 else -float(hash(tuple(ids[: position + 1])) % 1000)


@given(options, st.sampled_from([None, [], [7]]))
def test_every_option_gets_the_logprobs_of_all_its_tokens(
    found: list[list[int]], before: list[int] | None
) -> None:
    wanted = scored([[*PROMPT, *ids] for ids in found], len(PROMPT), before)
    inputs = score_inputs(wanted, "")
    results = [
        GenerateResult(
            rid="r",
            counts=Counts(prompt_tokens=1),
            input_logprobs=[
                logprob(list(each.prompt), i) for i in range(each.logprob_start, len(each.prompt))
            ],
        )
        for each in inputs
    ]
    output = score_output(wanted, len(found), results)
    for ids, option in zip(found, output.options, strict=True):
        whole = [*PROMPT, *ids]
        assert option.token_ids == ids
        assert option.logprobs == [logprob(whole, i) for i in range(len(PROMPT), len(whole))]
        if before is None:
            assert option.unconditional is None
        else:
            alone = [*before, *ids]
            assert option.unconditional == [logprob(alone, i) or 0.0 for i in range(len(before), len(alone))]
    assert output.counts.prompt_tokens == len(inputs)
    # No token of the options' tree is asked for twice.
    nodes = {tuple(ids[:i]) for ids in found for i in range(1, len(ids) + 1)}
    asked = sum(len(each.prompt) - each.logprob_start for each in inputs)
    assert asked == len(nodes) * (1 if before is None else 2)
