"""``choices``: the text is exactly one of the options."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trellis.errors import ConstraintError
from trellis.fsm import ConstraintSpec, Grammar, Vocabulary, compile_grammar


def texts(grammar: Grammar, vocabulary: Vocabulary, limit: int = 10_000) -> set[bytes]:
    """Every text that the masks lead to; stops at EOS."""
    found: set[bytes] = set()
    matcher = grammar.matcher()
    row = np.empty(vocabulary.mask_words, np.int32)

    def visit(prefix: bytes) -> None:
        assert len(found) < limit
        matcher.fill_mask(row)
        for token in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist():
            if token in vocabulary.eos_token_ids:
                found.add(prefix)
                continue
            assert matcher.accept(token)
            visit(prefix + vocabulary.token_bytes[token])
            matcher.rollback(1)

    visit(b"")
    return found


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    options=st.lists(st.text(st.sampled_from("abcé東😀 \n\x00"), max_size=5), min_size=1, max_size=8).filter(
        any
    )
)
def test_the_masks_lead_to_the_options_and_nothing_else(tiny: Vocabulary, options: list[str]) -> None:
    grammar = compile_grammar(ConstraintSpec.choices(options), tiny)
    assert texts(grammar, tiny) == {option.encode() for option in options}
    for option in options:
        assert grammar.accepts(option)
        assert grammar.accepts(option + "x") == (option + "x" in options)
        assert grammar.accepts(option[:-1]) == (option[:-1] in options)


def test_an_option_that_begins_another_may_end_or_go_on(tiny: Vocabulary) -> None:
    matcher = compile_grammar(ConstraintSpec.choices(["ab", "abcd"]), tiny).matcher()
    assert all(map(matcher.accept, tiny.encode("ab")))
    assert matcher.is_accepting()
    assert not matcher.is_finished()
    assert all(map(matcher.accept, tiny.encode("cd")))
    assert matcher.is_finished()


def test_duplicates_are_one_option(tiny: Vocabulary) -> None:
    grammar = compile_grammar(ConstraintSpec.choices(["yes", "yes", "no"]), tiny)
    assert texts(grammar, tiny) == {b"yes", b"no"}


def test_an_empty_option_among_others_lets_the_text_end_at_once(tiny: Vocabulary) -> None:
    matcher = compile_grammar(ConstraintSpec.choices(["", "yes"]), tiny).matcher()
    assert matcher.is_accepting()
    assert not matcher.is_finished()


def test_ten_thousand_options(tiny: Vocabulary) -> None:
    rng = random.Random(0)
    options = ["".join(rng.choices("abcdeféü漢 ", k=rng.randint(1, 12))) for _ in range(9_990)] + ["zz"] * 10
    grammar = compile_grammar(ConstraintSpec.choices(options), tiny)
    for option in options[:200]:
        assert grammar.accepts(option)
        matcher = grammar.matcher()
        assert all(map(matcher.accept, tiny.encode(option)))
        assert matcher.is_accepting()
    assert not grammar.accepts("not an option")


@pytest.mark.parametrize(
    ("source", "code", "what"),
    [
        ("[]", "empty", "at least one"),
        ('[""]', "empty", "not the empty string"),
        ('["a", 3]', "syntax", "option 1"),
        ('{"a": 1}', "syntax", "array"),
        ('["a"', "syntax", "position"),
        (json.dumps(["a", "\ud800"]), "syntax", "surrogate"),
        ("[" * 100_000, "syntax", "array"),
    ],
)
def test_bad_choices_are_refused(tiny: Vocabulary, source: str, code: str, what: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        compile_grammar(ConstraintSpec("choices", source), tiny)
    assert caught.value.code == code
    assert what in str(caught.value)


def test_options_that_cannot_be_written_are_left_out_with_a_warning(gapped: Vocabulary) -> None:
    grammar = compile_grammar(ConstraintSpec.choices(["route 66", "route 77", "😀"]), gapped)
    assert texts(grammar, gapped) == {b"route 66"}
    assert "2 options" in grammar.warnings[0]
    with pytest.raises(ConstraintError, match="no option can be written"):
        compile_grammar(ConstraintSpec.choices(["7", "77"]), gapped)
