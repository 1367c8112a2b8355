"""Constraints made to be large end in a mask or in a clear refusal, within the budgets of the construction."""

from __future__ import annotations

import random

import numpy as np
import pytest

from trellis.errors import ConstraintError
from trellis.fsm import ConstraintSpec, Limits, Vocabulary, compile_grammar
from trellis.fsm.compressed import byte_automaton
from trellis.fsm.limits import Budget
from trellis.fsm.matcher import CompressedGrammar


def compiled(pattern: str, vocabulary: Vocabulary, limits: Limits | None = None) -> CompressedGrammar:
    grammar = compile_grammar(ConstraintSpec.regex(pattern), vocabulary, "compressed", limits)
    assert isinstance(grammar, CompressedGrammar)
    return grammar


def generate(grammar: CompressedGrammar, vocabulary: Vocabulary, steps: int, seed: int = 0) -> int:
    """Tokens that a random walk accepted before its end."""
    rng = random.Random(seed)
    matcher = grammar.matcher()
    row = np.empty(vocabulary.mask_words, np.int32)
    for step in range(steps):
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed.tolist()))
        assert matcher.accept(token)
        if matcher.is_finished():
            return step + 1
    return steps


@pytest.mark.parametrize(
    ("pattern", "states"),
    [
        ("(a|b)*a(a|b){30}", 1_000),
        ("[ab]*a[ab]{13}", 1_000),
        ("(((a{0,100}){0,100}){0,100})", 100),
        ("((a?){1000}){1000}", 100),
        ("((a{0,100}b?){0,100}c?){0,100}", 1_000),
        (r"(\w+\s?){1,100}", 10_000),
        ("(x+x+)+y", 100),
        ("a?" * 4000, 2_000),
        ("(a|b)?" * 1300, 1_000),
        ("(?:a|b?)*" * 800, 100),
        (".{0,10000}", 5_000),
        ("a{10000}" * 800, 5_000),
        ("(.*,){30}.*", 5_000),
        (r"((((([a-z]{1,10} ){1,10}x?){1,10}y?){1,10}z?){1,10}){1,10}", 10_000),
        ("|".join(f"w{i}" for i in range(1500)), 2_000),
        ("\x00[\\x00-\\x08]{0,9}", 1_000),
        ("(" * 64 + "a*" + ")*" * 64, 100),
        ("(?=(a|b)*a(a|b){30})[ab]*", 1_000),
        ("(?=(a|b)*a(a|b){30}c).*", 1_000),
        ("((?!a).){0,1000}", 5_000),
        ("(?:(?!foo).)*", 100),
        ("(?:(?!foo).){0,1000}", 5_000),
        (r"(?:(?=.*x)(?!.*y.{20}).)*", 10_000),
        ("(?:(?!.*(a|b)*a(a|b){20}c)[abc])*", 1_000),
        (r"(?=.{500}x).{0,600}", 5_000),
        ("((?=a)|(?=b))" * 200 + ".*", 100),
        ("(?!" * 60 + "a" + ")" * 60 + ".*", 100),
        ("(?:(?<=a.{40})b|[ab])*", 1_000),
        (r"(?<!" + "a" * 500 + ").*", 100),
        (r"\b" * 3000 + "a", 100),
        (r"\b\B" * 1500 + "|a", 100),
        (r"(?:\b\w?)*" * 500, 1_000),
    ],
    ids=lambda value: str(value)[:30],
)
def test_large_patterns_stay_small(tiny: Vocabulary, pattern: str, states: int) -> None:
    """The bound on states is far below what the repeats would unroll to."""
    grammar = compiled(pattern, tiny)
    assert generate(grammar, tiny, 30) > 0
    assert grammar.automaton.states <= states


def test_a_far_bound_shares_its_masks(tiny: Vocabulary) -> None:
    """Far from the end of ``.{0,10000}`` all positions allow the same, and need no mask of their own."""
    grammar = compiled("[a-z]{0,10000}", tiny)
    matcher = grammar.matcher()
    row = np.empty(tiny.mask_words, np.int32)
    matcher.fill_mask(row)
    before = grammar.automaton.masks
    for _ in range(300):
        assert matcher.accept(tiny.encode("a")[0])
        matcher.fill_mask(row)
    assert grammar.automaton.masks == before


@pytest.mark.parametrize("limits", [Limits(positions=20), Limits(states=100), Limits(memory_bytes=50_000)])
def test_a_budget_that_is_too_small_for_one_mask_refuses(tiny: Vocabulary, limits: Limits) -> None:
    with pytest.raises(ConstraintError, match="automaton needs more than") as caught:
        generate(compiled(r"(\w{1,30}[,.]){1,50}([^,]{1,100}[^;]{1,100}){1,100}", tiny, limits), tiny, 30)
    assert caught.value.code == "limit"


def test_a_full_automaton_is_replaced_and_every_request_goes_on(tiny: Vocabulary) -> None:
    """The budget bounds what is held at once: what earlier requests used does not fail a later one."""
    limits = Limits(states=400)
    grammar = compiled("(a|b)*a(a|b){12}c", tiny, limits)
    early = grammar.matcher()
    tokens = tiny.encode("abba")
    assert all(map(early.accept, tokens))
    automata = set()
    for seed in range(60):
        generate(grammar, tiny, 25, seed)
        automata.add(id(grammar.automaton))
        assert grammar.automaton.states <= limits.states
    assert len(automata) > 1
    row = np.empty(tiny.mask_words, np.int32)
    for token in tiny.encode("a" + "b" * 12 + "c"):  # on its old automaton, then on a new one
        early.fill_mask(row)
        assert early.accept(token)
    assert early.is_accepting()


def test_a_failed_mask_leaves_the_matcher_where_it_was(tiny: Vocabulary) -> None:
    matcher = compiled(r"[xy]{3}[!?]{3}[\w ]{1,500}", tiny, Limits(states=40)).matcher()
    row = np.empty(tiny.mask_words, np.int32)
    for token in tiny.encode("x") * 3 + tiny.encode("!") * 3:
        matcher.fill_mask(row)
        assert matcher.accept(token)
    for _ in range(2):
        with pytest.raises(ConstraintError, match="states"):
            matcher.fill_mask(row)
    matcher.rollback(1)
    matcher.fill_mask(row)
    assert matcher.accept(tiny.encode("?")[0])


@pytest.mark.parametrize(
    "pattern",
    [
        "".join(f"(?=.*{chr(97 + i)})" for i in range(26)) + "[a-y]*",
        "(?=(a|b)*a(a|b){30}$)(?=(a|b)*b(a|b){30}$)[ab]*",
        "".join(f"(?:(?=.*{a})|(?=.*{a.upper()}))" for a in "abcdefghij") + ".*",
    ],
)
def test_a_search_for_a_text_that_does_not_end_is_ended(tiny: Vocabulary, pattern: str) -> None:
    """Whether obligations contradict each other may take exponential time to find out."""
    with pytest.raises(ConstraintError) as caught:
        generate(compiled(pattern, tiny, Limits(compile_s=0.5, mask_s=0.5, states=20_000)), tiny, 30)
    assert caught.value.code in ("limit", "timeout")


@pytest.mark.parametrize(
    "pattern", ["x?y?" * 200, r"(?=a?b?c)\bd?" * 100, "(?:^a|b$)" * 100, "(?>ab|cd)" * 100]
)
def test_building_the_tree_of_a_pattern_is_ended_in_time(pattern: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        byte_automaton(ConstraintSpec.regex(pattern), Limits(compile_s=-1.0))
    assert caught.value.code == "timeout"


def test_time_is_a_budget_too() -> None:
    now = [0.0]
    budget = Budget("regex", Limits(), clock=lambda: now[0])

    def work() -> None:
        for _ in range(1000):
            budget.tick()

    budget.start(5.0)
    work()
    now[0] = 5.1
    with pytest.raises(ConstraintError, match="more than 5 s of CPU time") as caught:
        work()
    assert caught.value.code == "timeout"
    budget.start(1.0)
    work()


@pytest.mark.parametrize("options", [100_000, 10_001])
def test_too_many_choices_are_refused(tiny: Vocabulary, options: int) -> None:
    with pytest.raises(ConstraintError, match="at most 10000") as caught:
        compile_grammar(ConstraintSpec.choices([str(i) for i in range(options)]), tiny)
    assert caught.value.code == "limit"


def test_choices_of_five_megabytes_are_refused(tiny: Vocabulary) -> None:
    with pytest.raises(ConstraintError, match="bytes") as caught:
        compile_grammar(ConstraintSpec.choices(["x" * 1000 + str(i) for i in range(5000)]), tiny)
    assert caught.value.code == "limit"
