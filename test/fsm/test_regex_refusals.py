"""What is not valid, not regular or not supported is refused by name, with its place."""

from __future__ import annotations

import pytest

from trellis.errors import ConstraintError
from trellis.fsm import ConstraintSpec, Limits, Vocabulary, compile_grammar


def refusal(pattern: str, vocabulary: Vocabulary, limits: Limits | None = None) -> ConstraintError:
    with pytest.raises(ConstraintError) as caught:
        compile_grammar(ConstraintSpec.regex(pattern), vocabulary, limits=limits)
    assert caught.value.kind == caught.value.field == "regex"
    return caught.value


@pytest.mark.parametrize(
    ("pattern", "where"),
    [("foo**", 4), ("a(b", 1), ("[a", 0), ("a)", 1), (r"\q", 0), ("a{3,2}", 2), ("(?P<1>a)", 4), ("*a", 0)],
)
def test_an_invalid_pattern_says_where(tiny: Vocabulary, pattern: str, where: int) -> None:
    error = refusal(pattern, tiny)
    assert (error.code, error.where) == ("syntax", f"position {where}")


@pytest.mark.parametrize("bound", ["9" * 5000, "9" * 30])
def test_a_bound_too_large_to_be_read_is_over_a_limit(tiny: Vocabulary, bound: str) -> None:
    error = refusal("a{" + bound + "}", tiny)
    assert error.code == "limit"
    assert "not a valid regex" in error.detail
    schema = ConstraintSpec("schema", '{"type": "string", "pattern": "a{' + bound + '}"}')
    with pytest.raises(ConstraintError, match="pattern"):
        compile_grammar(schema, tiny)


@pytest.mark.parametrize(
    ("pattern", "name", "where"),
    [
        (r"(a|b)-\1", "back-reference", 6),
        (r"(?P<n>a)[(?=](?P=n)", "back-reference", 13),
        (r"(a)?(?(1)b|c)", "conditional", 4),
        (r"(?=(a)\1)a+", "back-reference", 6),
        (r"(?!(a)?(?(1)b|c))a+", "conditional", 7),
        (r"(?i)(é)\1", "back-reference", 7),
    ],
)
def test_what_is_not_supported_is_named(tiny: Vocabulary, pattern: str, name: str, where: int) -> None:
    error = refusal(pattern, tiny)
    assert error.code == "unsupported"
    assert name in error.detail
    assert error.where == f"position {where}"


@pytest.mark.parametrize(
    ("pattern", "name", "where"),
    [
        (r"a?\bb", "word boundaries", 2),
        (r"[\b]\\b*\Bx?", "word boundaries", 8),
        (r"ab*(?=cd)\w+", "look-around", 3),
        (r"a(?!bb)\w+", "look-around", 1),
        (r"x+(?<=xx)y", "look-around", 2),
        (r"(?x) a # (?=z)" + "\n" + r" (?=bb)b+", "look-around", 16),
        (r"ab(^c)*", "anchor inside a repeat", 3),
        (r"(?m)a\n?^b", "'^' with the flag (?m)", 8),
        (r"(?m)a$\n?b", "'$' with the flag (?m)", 5),
    ],
)
def test_an_engine_without_assertions_names_the_first(
    tiny: Vocabulary, pattern: str, name: str, where: int
) -> None:
    compile_grammar(ConstraintSpec.regex(pattern), tiny)
    with pytest.raises(ConstraintError) as caught:
        compile_grammar(ConstraintSpec.regex(pattern), tiny, "llguidance")
    assert caught.value.code == "unsupported"
    assert name in caught.value.detail
    assert caught.value.where == f"position {where}"


@pytest.mark.parametrize(
    ("pattern", "where"),
    [("x(?>a|ab)b", 1), ("a*+a", 2), ("(a+?)++", 6), (r"\d{1,3}+5", 7), ("(?:ab?)*+b", 8)],
)
def test_possessive_quantifiers_that_mean_something_else_are_refused(
    tiny: Vocabulary, pattern: str, where: int
) -> None:
    pytest.importorskip("re._parser", reason="Python 3.10 has no possessive quantifiers")
    error = refusal(pattern, tiny)
    assert (error.code, error.where) == ("unsupported", f"position {where}")
    assert "possessive" in error.detail


@pytest.mark.parametrize(
    "pattern", [r"[^\s\S]", "a[^\\d\\D]b", "(?!)", "a^b", "a$b", "\ud800", "[\ud800-\udfff]+"]
)
def test_a_pattern_that_nothing_matches_is_refused(tiny: Vocabulary, pattern: str) -> None:
    error = refusal(pattern, tiny)
    assert error.code == "empty"
    assert "no text matches" in error.detail


@pytest.mark.parametrize("pattern", ["7+", "1?7", "[a-c]+😀", "\U00010000"])
def test_a_pattern_that_the_vocabulary_cannot_write_is_refused(gapped: Vocabulary, pattern: str) -> None:
    error = refusal(pattern, gapped)
    assert error.code == "empty"
    assert "vocabulary" in error.detail


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("a" * 8193, "8193 bytes"),
        ("é" * 4097, "8194 bytes"),
        ("(" * 200 + "a" + ")" * 200, "200 deep"),
        ("a{10001}", "repeat of 10001"),
        ("a{0,20000}", "repeat of 20000"),
        ("a{12345,}", "repeat of 12345"),
        ("a{99999999999}", "too large"),
        ("(?i)" + "[\\x00-\U0010ffff]" * 500, "(?i)"),
    ],
)
def test_a_pattern_over_a_limit_says_which(tiny: Vocabulary, pattern: str, what: str) -> None:
    error = refusal(pattern, tiny)
    assert error.code == "limit"
    assert what in error.detail


def test_limits_are_settings(tiny: Vocabulary) -> None:
    assert refusal("abcd", tiny, Limits(pattern_bytes=3)).code == "limit"
    assert refusal("((a))", tiny, Limits(nesting=1)).code == "limit"
    assert refusal("a{6}", tiny, Limits(repeat=5)).code == "limit"
    assert compile_grammar(ConstraintSpec.regex("((a{6}))"), tiny).accepts("aaaaaa")
