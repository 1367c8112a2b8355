"""Choice methods on hand-made log-probabilities."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis.errors import BackendError, ProgramError
from trellis.frontend import ChoiceMethod, MockBackend, SelectMeta, function, gen, select
from trellis.frontend.backends.base import Backend, OptionScore
from trellis.frontend.choices import EXACT, GREEDY, MEAN, SUM, UNCONDITIONAL, decide, softmax

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


# -- exact and unconditional -------------------------------------------------------------------------------------


def scored(paths: dict[tuple[int, ...], list[float]]) -> list[OptionScore]:
    return [OptionScore(ids, tuple(math.log(p) for p in row)) for ids, row in paths.items()]


def exact_probabilities(options: list[OptionScore]) -> list[float]:
    return [math.exp(score) for score in EXACT.score(options)]


def test_exact_divides_the_probability_among_the_tokens_that_may_come() -> None:
    found = exact_probabilities(
        scored({(1, 2): [0.4, 0.3], (1, 3): [0.4, 0.1], (4,): [0.1], (5, 6, 7): [0.3, 0.01, 0.5]})
    )
    assert found == pytest.approx([0.4 / 0.8 * 0.75, 0.4 / 0.8 * 0.25, 0.1 / 0.8, 0.3 / 0.8])


def test_exact_gives_an_option_that_others_go_on_from_what_their_tokens_leave() -> None:
    found = exact_probabilities(scored({(1,): [0.6], (1, 2): [0.6, 0.3], (1, 3): [0.6, 0.2], (4,): [0.2]}))
    assert found == pytest.approx([0.75 * 0.5, 0.75 * 0.3, 0.75 * 0.2, 0.25])


def test_exact_where_no_token_can_come() -> None:
    options = [OptionScore((1,), (-math.inf,)), OptionScore((2,), (-math.inf,))]
    assert exact_probabilities(options) == pytest.approx([0.5, 0.5])
    certain = scored({(1,): [1.0], (1, 2): [1.0, 1.0]})
    assert exact_probabilities(certain) == pytest.approx([0.0, 1.0])


def tree_of_options(draw_probability, depth: int, path: tuple[int, ...] = (), row: tuple[float, ...] = ()):
    """(path, logprobs) of the leaves and some inner nodes of a random tree of tokens, and what a walk of it gives."""
    count = 0 if depth == 0 else draw_probability("children")
    if not count:
        return [(path, row)], {path: 1.0}
    shares = [draw_probability("share") for _ in range(count)]
    scale = draw_probability("total") / 10 / sum(shares)
    ends = bool(path) and draw_probability("ends") > 2
    leaves, found = ([(path, row)], {path: 1 - scale * sum(shares)}) if ends else ([], {})
    left = 1.0 if ends else scale * sum(shares)
    for token, share in enumerate(shares):
        p = scale * share
        below, inside = tree_of_options(draw_probability, depth - 1, (*path, token), (*row, math.log(p)))
        leaves += below
        found.update({key: value * p / left for key, value in inside.items()})
    return leaves, found


@given(st.data())
def test_exact_is_a_walk_of_the_tree_of_tokens(data) -> None:
    ranges = {
        "children": st.integers(0, 3),
        "share": st.integers(1, 9),
        "total": st.integers(1, 9),
        "ends": st.integers(0, 4),
    }
    leaves, expected = tree_of_options(lambda what: data.draw(ranges[what]), depth=4)
    rows = [OptionScore(path, row) for path, row in leaves if path]
    if not rows:
        return
    found = exact_probabilities(rows)
    assert found == pytest.approx([expected[option.token_ids] for option in rows])
    assert math.fsum(found) == pytest.approx(1)


def test_unconditional_takes_what_the_prompt_adds() -> None:
    conditional = {"organ": [-1.0], "organism": [-2.0, -0.9]}
    alone = {"organ": [-1.1], "organism": [-2.5, -1.5]}
    backend = MockBackend(
        scores=lambda _p, options: [conditional[o] for o in options],
        alone=lambda prompt, options: [alone[o] for o in options] if prompt == "" else [],
    )

    @function
    def program(s):
        s += "An " + select("word", list(conditional), method="unconditional_likelihood_normalized")

    state = program.run(backend=backend)
    meta = state.meta("word")
    assert state["word"] == "organism"
    assert meta.scores == pytest.approx((0.1, 0.55))
    assert meta.option_unconditional_logprobs == ((-1.1,), (-2.5, -1.5))
    assert meta.method == "unconditional"


def test_a_token_that_never_comes_says_nothing_unconditionally() -> None:
    options = [OptionScore((1, 2), (-1.0, -2.0), (-math.inf, -3.0))]
    assert UNCONDITIONAL.score(options) == pytest.approx([0.0])
    with pytest.raises(BackendError, match="no unconditional log-probabilities of option 0"):
        UNCONDITIONAL.score([OptionScore((1,), (-1.0,))])


class ScoresOnly(MockBackend):
    """A backend that cannot score without the prompt."""

    score_unconditionally = Backend.score_unconditionally


def test_a_backend_that_cannot_score_without_the_prompt_says_so() -> None:
    @function
    def program(s):
        s += "An " + select("word", ["a", "b"], method="unconditional")

    with pytest.raises(ProgramError, match=r"select\.method.*ScoresOnly.*use 'mean'"):
        program.run(backend=ScoresOnly())


@pytest.mark.model
def test_exact_agrees_with_how_often_the_model_writes_each_option(engine) -> None:
    options = [" red", " dark red", " dark blue", " green"]

    @function
    def program(s):
        s += "My favourite colour is"
        branch = s.copy()
        branch += gen("drawn", choices=options, n=100, temperature=1.0, seed=1, token_healing=False)
        s["drawn"] = branch["drawn"]
        s += select("x", options, method="exact")

    state = program.run(backend=engine)
    for option, probability in zip(options, state.meta("x").probabilities, strict=True):
        share = state["drawn"].count(option) / 100
        deviation = math.sqrt(probability * (1 - probability) / 100)
        assert share == pytest.approx(probability, abs=4 * deviation + 0.02)


def test_a_thousand_options_on_a_mock() -> None:
    options = [f"option {i}" for i in range(1000)]

    @function
    def program(s):
        s += select("x", options, method="sum")

    backend = MockBackend(scores=lambda _p, found: [[-abs(637.0 - i)] for i in range(len(found))])
    state = program.run(backend=backend)
    assert state["x"] == "option 637"
    assert len(backend.score_requests) == 1
    assert math.fsum(state.meta("x").probabilities) == pytest.approx(1)


@pytest.mark.model
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_options_are_one_request_that_shares_what_they_begin_with(engine, count) -> None:
    options = [f" {i}" for i in range(count)]

    @function
    def program(s):
        s += "Count on, please: 7, 8, 9, 10," + select("x", options, method="exact")

    state = program.run(backend=engine)
    meta = state.meta("x")
    assert state["x"] == " 11"
    assert len(meta.probabilities) == count
    assert math.fsum(meta.probabilities) == pytest.approx(1)
    # What the options begin with is computed once, and of each the token before its own part, for its logits.
    own = {ids[:i] for ids in meta.option_token_ids for i in range(1, len(ids) + 1)}
    assert meta.counts.prompt_tokens - meta.counts.cached_tokens <= len(own) + len(options) + 40
