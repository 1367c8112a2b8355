"""Patterns of JSON schema: their translation, their algebra and the formats written as patterns."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis.fsm.json_schema import prepare
from trellis.fsm.json_schema.matching import matches
from trellis.fsm.json_schema.patterns import PatternError, exactly, for_llguidance, translate
from trellis.fsm.json_schema.regular import PatternAlgebra, TooHard

ATOMS = [
    "a",
    "b",
    "ab",
    "[ab]",
    "[^a]",
    ".",
    "^",
    "$",
    "(a|b)",
    "(?:ab|)",
    "a*",
    "b+",
    "(ab)?",
    "a{1,2}",
    "|",
    "\\d",
]
patterns = st.lists(st.sampled_from(ATOMS), max_size=5).map("".join)
texts = st.text(alphabet="ab1\n", max_size=6)


@given(patterns, texts)
@settings(max_examples=300, deadline=None)
def test_matching_means_what_re_means(pattern: str, text: str) -> None:
    translation = translate(pattern)
    assert matches(translation, text) == bool(re.search(translation, text))


@given(patterns, patterns, texts)
@settings(max_examples=150, deadline=None)
def test_the_algebra_of_patterns(one: str, other: str, text: str) -> None:
    algebra = PatternAlgebra()
    first, second = translate(one), translate(other)
    in_first, in_second = matches(first, text), matches(second, text)
    for inside, outside, expected in (
        ([first], [second], in_first and not in_second),
        ([first, second], [], in_first and in_second),
        ([], [first, second], not in_first and not in_second),
    ):
        try:
            written = algebra.difference(inside, outside)
        except TooHard:
            continue
        assert (written is not None and bool(re.search(written, text))) == expected
    if algebra.disjoint([first, second]):
        assert not (in_first and in_second)
    if algebra.included([first], second):
        assert not (in_first and not in_second)


@given(st.lists(st.text(max_size=4), min_size=1, max_size=4), st.text(max_size=4))
@settings(max_examples=100, deadline=None)
def test_a_pattern_for_exactly_these_texts(wanted: list[str], text: str) -> None:
    assert all(matches(exactly(wanted), each) for each in wanted)
    assert matches(exactly(wanted), text) == (text in wanted)


@pytest.mark.parametrize(
    ("pattern", "found", "missed"),
    [
        (r"^\d$", ["1"], ["٣", "1\n"]),
        (r"^\w$", ["a", "_"], ["é", "-"]),
        (r"^\W$", ["é", "-"], ["a"]),
        (r"^[\W]$", ["é"], ["_"]),
        (r"^\s$", [" ", "\u00a0", "\ufeff"], ["a", "\x1c"]),
        (r"^[\s\S]$", ["\n", "a"], [""]),
        (r"^a{,3}$", ["a{,3}"], ["aa", ""]),
        (r"^{a}$", ["{a}"], ["a"]),
        (r"^\cJ$", ["\n"], ["J"]),
        (r"^\u{1F600}$", ["😀"], ["\u1f60"]),
        (r"^\ud83d\ude00$", ["😀"], [""]),
        (r"^\/\-\_$", ["/-_"], ["/"]),
        (r"^[[a]$", ["[", "a"], ["b"]),
        (r"^[a&&b]$", ["a", "&", "b"], ["&&"]),
        (r"^[a\d-z]$", ["-", "5", "z"], ["b"]),
        (r"^\p{Lu}\P{L}$", ["Ä1"], ["ä1", "Äa"]),
        (r"^(?<year>\d{4})$", ["2024"], ["24"]),
        (r"^a+?$", ["aa"], [""]),
        (r"(?i)^straße$", ["STRAßE", "straße"], ["strasse"]),
        (r"a|^b$", ["xax", "b"], ["bb"]),
        ("^[^]$", ["x", "\n"], [""]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^\0$", ["\0"], ["0"]),
    ],
)
def test_translation(pattern: str, found: list[str], missed: list[str]) -> None:
    translation = translate(pattern)
    for text in found:
        assert matches(translation, text), text
        assert re.search(translation, text), text
    for text in missed:
        assert not matches(translation, text), text


@pytest.mark.parametrize(
    ("pattern", "unsupported"),
    [(r"(?=a)", True), (r"\b", True), (r"(a)\1", True), (r"\Aa", True), ("[]", True), (r"\p{Klingon}", True),
     ("a**", False), ("a++", False), ("(", False), ("[b-a]", False), (r"\x1", False), ("a{3,2}", False), ("\\", False)],
)  # fmt: skip
def test_patterns_that_are_refused(pattern: str, unsupported: bool) -> None:
    with pytest.raises(PatternError) as caught:
        translate(pattern)
    assert caught.value.unsupported is unsupported


def test_the_end_is_written_as_each_dialect_wants_it() -> None:
    assert translate(r"a\\$") == r"a\\\Z"
    assert for_llguidance(translate(r"a\\$")) == r"a\\$"
    assert for_llguidance(translate(r"\\Z")) == r"\\Z"


FORMATS = {
    "date": (["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-13-01", "2024-4-1"]),
    "time": (["12:00:00Z", "23:59:60Z", "01:02:03.5+05:30"], ["24:00:00Z", "12:00:00", "12:60:00Z", "22:59:60Z"]),
    "date-time": (["2024-11-30T12:34:56Z"], ["2024-11-30 12:34:56Z", "2024-11-30", "Invalid Date"]),
    "duration": (["P1Y2M3DT4H5M6S", "PT1S", "P3W"], ["P", "PT", "1D", "P1WT1H", "P1D2H"]),
    "email": (["a.b+c@example.org", "x@[127.0.0.1]"], ["a@", "@b", "a b@c.d", "a..b@c.d", "a@-b.c"]),
    "hostname": (["example.org", "a-b.c1"], ["-a.org", "a..b", "a_b", "", "x" * 64]),
    "ipv4": (["0.0.0.0", "255.255.255.255"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (
        ["::", "::1", "1::", "2001:db8::8a2e:370:7334", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "1:2:3:4:5:6:7::"],
        [":::", "1:2:3:4:5:6:7", "1::2::3", "12345::", "1:2:3:4:5:6:7:8:9", "::1.2.3"],
    ),
    "uri": (["http://a.b/c?d#e", "mailto:x@y", "urn:x:y", "a://[::1]:80/"], ["//a", "a b:c", "", "http://a b", "x"]),
    "uri-reference": (["", "/a", "a/b?c", "#f", "http://x"], ["a b", "a\\b", "::"]),
    "uuid": (["01234567-89ab-CDEF-0123-456789abcdef"], ["0123456789abcdef0123456789abcdef"]),
    "json-pointer": (["", "/a~1b/~0", "/"], ["a", "/~2"]),
    "relative-json-pointer": (["0", "1/a", "2#"], ["-1", "01", "/a"]),
    "iri": (["http://é.org/日"], ["é"]),
    "uri-template": (["/a{?q,r*}", "{+x:3}"], ["{", "{?}", "{a b}"]),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats(name: str) -> None:
    valid, invalid = FORMATS[name]
    prepared = prepare(json.dumps({"type": "string", "format": name}))
    assert prepared.validated_only == prepared.warnings == []
    for text in valid:
        assert prepared.validate(json.dumps(text)) is None, text
    for text in invalid:
        assert prepared.validate(json.dumps(text)), text
    assert prepare(json.dumps({"format": name})).validate("1") is None


def test_numeric_formats_say_nothing_about_strings() -> None:
    assert prepare('{"type": "integer", "format": "int32"}').warnings == []
    assert prepare('{"type": "number", "format": "utc-millisec"}').validate("1") is None
