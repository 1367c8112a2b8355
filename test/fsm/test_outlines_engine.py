"""The ``outlines`` engine: what it takes means the same as elsewhere; where its index differs it refuses."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from trellis.errors import ConstraintError
from trellis.fsm import ConstraintSpec, Grammar, Vocabulary, compile_grammar, outlines_engine

pytest.importorskip("outlines_core")

RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck))


def build(spec: ConstraintSpec, vocabulary: Vocabulary) -> Grammar:
    return compile_grammar(spec, vocabulary, "outlines")


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("[0-9]{4}-[0-9]{2}", ["2024-11"]),
        ("(ab|a)c?", ["ab", "a", "ac", "abc"]),
        (r'\{"name": "[a-z]{1,9}"\}', ['{"name": "anna"}']),
        ("a*?b", ["b", "aab"]),
        ("the (north|south)", ["the north"]),
        (r"^\b(?!x)[a-z]e\b$", ["he"]),
        (r"(?=[a-m])[a-z]e(?<!x)", ["he", "be"]),
    ],
)
def test_its_masks_are_those_of_the_compressed_engine(
    tiny: Vocabulary, pattern: str, texts: list[str]
) -> None:
    spec = ConstraintSpec.regex(pattern)
    grammar, other = build(spec, tiny), compile_grammar(spec, tiny, "compressed")
    assert grammar.engine == "outlines"
    row, expected = (np.empty(tiny.mask_words, np.int32) for _ in range(2))
    for text in texts:
        assert grammar.accepts(text)
        theirs, ours = grammar.matcher(), other.matcher()
        for token in tiny.encode(text):
            theirs.fill_mask(row)
            ours.fill_mask(expected)
            assert np.array_equal(row, expected)
            assert theirs.forced() == ours.forced()
            assert theirs.accept(token)
            assert ours.accept(token)
        assert theirs.is_accepting()


@pytest.mark.parametrize(
    ("pattern", "lost"),
    [
        ("a|ab", "ab"),  # the first alternative that fits wins
        ("(ab)?|abc", "abc"),
        ("[a-zé]+", "hé"),  # a character of several bytes after an accepting state
        ("(yes|no)?", "no"),
    ],
)
def test_a_pattern_whose_language_the_index_changes_is_refused(
    tiny: Vocabulary, pattern: str, lost: str
) -> None:
    assert re.fullmatch(pattern, lost)
    with pytest.raises(ConstraintError, match="another language") as caught:
        build(ConstraintSpec.regex(pattern), tiny)
    assert caught.value.code == "unsupported"


def test_choices_that_begin_with_each_other(tiny: Vocabulary) -> None:
    options = ["a", "ab", "abc", "x-y", "1.5", "(no)"]
    grammar = build(ConstraintSpec.choices(options), tiny)
    assert all(map(grammar.accepts, options))
    for option in options:
        matcher = grammar.matcher()
        assert all(map(matcher.accept, tiny.encode(option)))
        assert matcher.is_accepting()


def test_what_outlines_core_cannot_read_is_refused(tiny: Vocabulary) -> None:
    with pytest.raises(ConstraintError, match="outlines-core refuses it") as caught:
        build(ConstraintSpec.regex("(?a:x)"), tiny)
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize(
    ("pattern", "where"), [(r"x(?=ab)[a-z]{2}", 1), (r"a+\b.?", 2), ("[a-z]+(?<!no)", 6)]
)
def test_assertions_that_are_left_are_refused_by_place(tiny: Vocabulary, pattern: str, where: int) -> None:
    with pytest.raises(ConstraintError, match="look-around") as caught:
        build(ConstraintSpec.regex(pattern), tiny)
    assert (caught.value.code, caught.value.where) == ("unsupported", f"position {where}")


def test_an_index_that_would_be_too_large_is_not_begun(
    tiny: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlines_engine, "_index", lambda *_: pytest.fail("was begun"))
    for pattern in ("[a-z ]{0,9000}", "(a|b)*a(a|b){30}"):
        with pytest.raises(ConstraintError) as caught:
            build(ConstraintSpec.regex(pattern), tiny)
        assert caught.value.code in ("limit", "timeout")


def test_without_the_package_the_message_says_what_to_install(
    tiny: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlines_engine, "find_spec", lambda _: None)
    with pytest.raises(ConstraintError, match="pip install outlines-core"):
        build(ConstraintSpec.regex("a"), tiny)


@settings(RELAXED, max_examples=80)
@given(data=st.data())
def test_what_it_accepts_is_what_re_accepts(patterns: Any, tiny: Vocabulary, data: st.DataObject) -> None:
    """By tokens: a text is reached exactly if it matches."""
    pattern = data.draw(patterns.strategy)
    try:
        grammar = build(ConstraintSpec.regex(pattern.text), tiny)
    except ConstraintError as error:
        assume(error.code not in ("unsupported", "empty", "limit"))
        raise
    for text in patterns.texts(pattern, random.Random(data.draw(st.integers(0, 999))), 5):
        matcher = grammar.matcher()
        taken = all(map(matcher.accept, tiny.encode(text))) and matcher.is_accepting()
        assert taken == (re.fullmatch(pattern.text, text) is not None), text
