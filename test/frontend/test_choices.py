"""Choice methods on hand-made log-probabilities."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis.errors import BackendError
from trellis.frontend import ChoiceMethod, MockBackend, SelectMeta, function, select
from trellis.frontend.backends.base import OptionScore
from trellis.frontend.choices import GREEDY, MEAN, SUM, decide, softmax

# The classic case: a long word with predictable tail, against short ones.
ORGAN = {
    "organ": [-1.0],
    "organism": [-2.0, -0.9],
    "antidisestablishmentarianism": [-4.0, -0.1, -0.1, -0.1, -0.1],
}


def options(rows):
    return [OptionScore(tuple(range(len(row))), tuple(row)) for row in rows]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("mean", "antidisestablishmentarianism"),  # -0.88 beats -1.0 and -1.45
        ("sum", "organ"),  # -1.0 beats -2.9 and -4.4
        ("greedy", "organ"),  # best first token
    ],
)
def test_methods_differ_as_they_should(method: str, expected: str) -> None:
    @function
    def program(s):
        s += "An " + select("word", list(ORGAN), method=method)

    backend = MockBackend(scores=lambda _prompt, choices: [ORGAN[c] for c in choices])
    state = program.run(backend=backend)
    assert state["word"] == expected
    assert state.text() == "An " + expected
    assert state.meta("word").method == method


def test_meta_has_scores_probabilities_and_tokens() -> None:
    @function
    def program(s):
        s += "An " + select("word", list(ORGAN), method="sum")

    meta = program.run(backend=MockBackend(scores=lambda _p, c: [ORGAN[o] for o in c])).meta("word")
    assert isinstance(meta, SelectMeta)
    assert meta.choices == tuple(ORGAN)
    assert meta.scores == pytest.approx((-1.0, -2.9, -4.4))
    total = math.exp(-1.0) + math.exp(-2.9) + math.exp(-4.4)
    assert meta.probabilities == pytest.approx([math.exp(x) / total for x in (-1.0, -2.9, -4.4)])
    assert meta.option_logprobs == tuple(tuple(row) for row in ORGAN.values())
    assert meta.logprobs == (-1.0,)
    assert [len(ids) for ids in meta.option_token_ids] == [1, 2, 5]


def test_certain_tokens_count_in_the_mean() -> None:
    decision = decide(MEAN, options([[-1.0, 0.0], [-0.6]]))
    assert decision.scores == (-0.5, -0.6)
    assert decision.index == 0


def test_all_certain_and_impossible_tokens_are_no_accident() -> None:
    assert decide(MEAN, options([[0.0], [0.0, 0.0]])).index == 0
    decision = decide(SUM, options([[-math.inf, -1.0], [-5.0]]))
    assert decision.index == 1
    assert decision.probabilities == (0.0, 1.0)
    assert decide(SUM, options([[-math.inf], [-math.inf]])).probabilities == (0.5, 0.5)


def test_ties_go_to_the_first() -> None:
    for method in (MEAN, SUM, GREEDY):
        assert decide(method, options([[-2.0], [-1.0], [-1.0]])).index == 1


def test_greedy_pads_shorter_options_with_their_own_mean() -> None:
    # Equal first tokens; then -1.0 (own mean of the short one) against -0.5.
    assert decide(GREEDY, options([[-1.0], [-1.0, -0.5]])).index == 1
    assert decide(GREEDY, options([[-1.0], [-1.0, -1.5]])).index == 0
    # Misled by an attractive first token, as greedy is.
    assert decide(GREEDY, options([[-0.1, -9.0], [-0.2, -0.1]])).index == 0


def test_an_option_without_tokens_is_an_error_of_the_backend() -> None:
    with pytest.raises(BackendError, match="no token of option 1"):
        decide(MEAN, options([[-1.0], []]))


def test_temperature_draws_by_the_probabilities() -> None:
    rows = options([[-1.0], [-2.0]])
    drawn = [decide(SUM, rows, temperature=1.0, seed=seed).index for seed in range(2000)]
    share = drawn.count(0) / len(drawn)
    assert share == pytest.approx(1 / (1 + math.exp(-1)), abs=0.04)  # 4 standard deviations
    assert decide(SUM, rows, temperature=1.0, seed=7) == decide(SUM, rows, temperature=1.0, seed=7)
    assert decide(SUM, rows, temperature=0.5).probabilities[0] > decide(SUM, rows).probabilities[0]


def test_a_method_of_ones_own() -> None:
    worst = ChoiceMethod("worst", SUM.score, lambda _rows, scores: scores.index(min(scores)))

    @function
    def program(s):
        s += select("x", ["good", "bad"], method=worst)

    assert program.run(backend=MockBackend(scores={"good": -1.0, "bad": -3.0}))["x"] == "bad"


@given(st.lists(st.lists(st.floats(-50, 0), min_size=1, max_size=6), min_size=1, max_size=8))
def test_probabilities_add_up_and_the_winner_is_consistent(rows: list[list[float]]) -> None:
    for method in (MEAN, SUM):
        decision = decide(method, options(rows))
        assert math.fsum(decision.probabilities) == pytest.approx(1.0)
        assert decision.scores[decision.index] == max(decision.scores)
        assert decision.index == decision.scores.index(max(decision.scores))
    assert 0 <= decide(GREEDY, options(rows)).index < len(rows)


@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=6), st.floats(0.01, 10))
def test_softmax_is_a_distribution_in_the_order_of_the_scores(
    scores: list[float], temperature: float
) -> None:
    probabilities = softmax(scores, temperature)
    assert math.fsum(probabilities) == pytest.approx(1.0)
    for i in range(len(scores)):
        for j in range(len(scores)):
            if scores[i] > scores[j]:
                assert probabilities[i] >= probabilities[j]
