"""What the compressed engine accepts is what ``re.fullmatch`` accepts: as text, and token by token."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from trellis.errors import ConstraintError
from trellis.fsm import ConstraintSpec, Grammar, Vocabulary, compile_grammar

RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck))


def compiled(pattern: str, vocabulary: Vocabulary) -> Grammar | None:
    """The grammar, or None if no text satisfies the pattern. A pattern that is not supported is no example."""
    try:
        return compile_grammar(ConstraintSpec.regex(pattern), vocabulary)
    except ConstraintError as error:
        assume(error.code != "unsupported")
        if error.code == "empty":
            return None
        raise


def spelled(grammar: Grammar, vocabulary: Vocabulary, text: str) -> bool:
    """Is the text accepted in the model's own tokens, with EOS after it?"""
    matcher = grammar.matcher()
    return all(map(matcher.accept, vocabulary.encode(text))) and matcher.accept(min(vocabulary.eos_token_ids))


@settings(RELAXED, max_examples=250)
@given(data=st.data())
def test_random_patterns_mean_what_re_means(patterns: Any, tiny: Vocabulary, data: st.DataObject) -> None:
    pattern = data.draw(patterns.strategy)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    oracle = re.compile(pattern.text)
    grammar = compiled(pattern.text, tiny)
    for text in patterns.texts(pattern, rng, 6):
        expected = oracle.fullmatch(text) is not None
        if grammar is None:
            assert not expected
            continue
        assert grammar.accepts(text) == expected, (pattern.text, text)
        assert spelled(grammar, tiny, text) == expected, (pattern.text, text)


OCTET = r"(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"


@pytest.mark.parametrize(
    ("pattern", "accepted", "rejected"),
    [
        ("(ten|tenth|tent)( poles)?", ["ten", "tenth", "tent poles"], ["tenths", "te"]),
        ("[a-zà-ÿ ]+", ["café déjà", "abc"], ["ABC", "霍", ""]),
        (r"[\x00-\u2e7f]+", ["héllo", "a\nb", "\x00"], ["霍", ""]),
        (
            rf"({OCTET}\.){{3}}{OCTET}",
            ["127.0.0.1", "8.8.8.8", "255.255.255.255"],
            ["256.1.1.1", "01.2.3.4", "1.2.3"],
        ),
        ("\x00", ["\x00"], ["a", "", "\x00\x00"]),
        (
            r"^(first line\nsecond line|other line\nlast line)$",
            ["first line\nsecond line", "other line\nlast line"],
            [r"first line\nsecond line", "first line", "first line\nlast line"],
        ),
        (r"[^\n]+", ["plain text"], ["two\nlines", ""]),
        (r"a$\n?", ["a", "a\n"], ["a\n\n", ""]),
        (r"(^a|b)?c$", ["ac", "bc", "c"], ["c\n", "abc"]),
        (r"(?:^$|x$)", ["", "x"], ["x\n", "\n"]),
        (r"\Aab?\Z|^c", ["a", "ab", "c"], ["abc", "ab\n"]),
        (r"$^", [""], ["\n", "a"]),
        (r"(a|b$)\n?(c|\Z)", ["a\nc", "ac", "a", "b", "b\n", "a\n"], ["b\nc", "bc"]),
        (r"(?x) a  b # comment" + "\n" + r" [ ] c", ["ab c"], ["abc", "ab # comment"]),
        (r"(?i:straße|ǅ)x", ["STRAßEx", "STRAẞEx", "ǆx", "Ǆx"], ["strassex", "straßeX"]),
        (r"(?s:.)(?-s:.)", ["\n.", "ab"], ["a\n", "a"]),
        (r"[\w]+?", ["é漢字_1"], [" ", "", "e\u0301"]),
        (r"[\u0600-\u06ff]{2,}", ["مرحبا"], ["م", "hello"]),
        (r"[e\u0301]+😀{2}", ["e\u0301😀😀"], ["e\u0301😀", "é😀😀"]),
        ("", [""], ["a"]),
    ],
)
def test_cases_that_broke_others(
    tiny: Vocabulary, pattern: str, accepted: list[str], rejected: list[str]
) -> None:
    grammar = compile_grammar(ConstraintSpec.regex(pattern), tiny)
    for text in accepted + rejected:
        expected = text in accepted
        assert (re.fullmatch(pattern, text) is not None) == expected, text
        assert grammar.accepts(text) == expected, text
        assert spelled(grammar, tiny, text) == expected, text


@pytest.mark.parametrize(
    ("pattern", "accepted", "rejected"),
    [
        (r"\d++[a-z]", ["12a"], ["12", "a"]),
        (r"a?+b", ["ab", "b"], ["aab"]),
        (r"(?>cat|dog)s?", ["cats", "dog"], ["ca"]),
        (r"(?>\d{3}[a-z]*)-?", ["123abc-", "123"], ["12-"]),
        (r"(?:ab)*+c", ["ababc", "c"], ["aba"]),
        (r"x*+", ["", "xxx"], ["y"]),
    ],
)
def test_possessive_quantifiers_that_equal_the_plain_ones(
    tiny: Vocabulary, pattern: str, accepted: list[str], rejected: list[str]
) -> None:
    pytest.importorskip("re._parser", reason="Python 3.10 has no possessive quantifiers")
    grammar = compile_grammar(ConstraintSpec.regex(pattern), tiny)
    for text in accepted + rejected:
        assert grammar.accepts(text) == (text in accepted) == (re.fullmatch(pattern, text) is not None)


def test_texts_that_are_no_utf8_are_not_accepted(tiny: Vocabulary) -> None:
    grammar = compile_grammar(ConstraintSpec.regex("(?s).*"), tiny)
    assert grammar.accepts("é\x00\n😀".encode())
    for data in [
        b"\xff",
        b"\xc3",
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xe0\x80\x80",
        b"a\x80",
    ]:
        assert not grammar.accepts(data)
    assert not grammar.accepts("\ud800")


def test_the_language_does_not_depend_on_the_vocabulary(gapped: Vocabulary) -> None:
    """``accepts`` judges texts; what a vocabulary cannot write matters to its masks only."""
    grammar = compile_grammar(ConstraintSpec.regex("[0-9😀]+"), gapped)
    assert grammar.accepts("707😀")
    assert not spelled(grammar, gapped, "7")
    assert spelled(grammar, gapped, "808")
