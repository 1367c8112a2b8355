"""What is refused in a Lark grammar before an engine reads it."""

from __future__ import annotations

import pytest

from trellis.errors import ConstraintError
from trellis.fsm import Limits
from trellis.fsm.lark_source import check_lark


def refusal(source: str, limits: Limits | None = None) -> tuple[str, str]:
    with pytest.raises(ConstraintError) as caught:
        check_lark(source, limits or Limits())
    assert caught.value.kind == "grammar"
    return caught.value.code, caught.value.where


@pytest.mark.parametrize(
    "source",
    [
        'start: "a"',
        'start: a\na: "x" a?',
        'start: a\na: "x" (a | "y")',
        'start: a\na: "x" a{0,2}',
        'start: a\na: "x" a{,2}',
        'start: a\na: "x" a ~ 0..2 "y"',
        'start: a\na: "x" [a]',
        'start: a\na: b a -> both\n | "c" -> one\nb: "b"',
        '?start: expr\n?expr: expr "+" term | term\n?term: INT | "(" expr ")"\nINT: /[0-9]+/',
        'start: "a" /b\\/c: x/ y // y: y\ny: "<|im_end|>" # <|im_end|>\n',
        "%import common.INT\n%ignore /[ ]+/\nstart: INT",
        'start: %json {"properties": {"<x>": {"const": "}"}}} | x\nx: "a"',
        'start[capture="max_tokens"]: "a"',
        'start: a.b "x"',
        "",
        "start:",
        'start: ("a"',
        'start: "a" %json {"a": ',
    ],
)
def test_sound_grammars_and_what_the_engine_will_say_pass(source: str) -> None:
    check_lark(source, Limits())


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ('start: "a" <|im_end|>', "line 1, column 12"),
        ('start: "a"\n| <[12]> "b"', "line 2, column 3"),
        ('start: A\nA[max_tokens=3]: "a"', "line 2, column 3"),
        ('start: A\nA[capture, temperature=0.5]: "a"', "line 2, column 12"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "line 1, column 1"),
    ],
)
def test_what_would_break_a_promise_is_refused(source: str, where: str) -> None:
    assert refusal(source) == ("unsupported", where)


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ('start: a\na: "x" a', "line 1, column 1"),
        ('start: "b" | x\nx: y "z"\ny: x', "line 2, column 1"),
        ('start: "b" | (x)\n\nx: "y" ("z" x | x+) | x{2}', "line 3, column 1"),
        ('start: "b" x?\nx: "y" x ~ 1..2', "line 2, column 1"),
        ('start: A\nA: A "x"', "line 1, column 1"),
    ],
)
def test_rules_that_never_end_are_refused(source: str, where: str) -> None:
    assert refusal(source) == ("empty", where)


def test_limits() -> None:
    assert refusal('start: "' + "a" * 100 + '"', Limits(grammar_bytes=50))[0] == "limit"
    assert refusal("start: " + "(" * 100_000, Limits(grammar_bytes=1 << 20))[0] == "limit"
    assert refusal('start: "\ud800"') == ("syntax", "line 1, column 9")


def test_long_chains_and_many_mentions_take_linear_time() -> None:
    chain = "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(3000)) + '\na3000: "x"'
    star = "start: " + " ".join(f"a{i}" for i in range(3000))
    check_lark(f"{star}\n{chain}", Limits(grammar_bytes=1 << 20))


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ('start: "' + '\\"' * 32_000, "string"),
        ("start: /" + "\\/" * 32_000, "regular expression"),
        ('start: "a', "string"),
        ("start: a/\na: /x/", "regular expression"),
    ],
)
def test_what_is_not_closed_on_its_line_is_refused_where_it_begins(source: str, what: str) -> None:
    with pytest.raises(ConstraintError, match=f"the {what} that begins here is not closed") as refused:
        check_lark(source, Limits())
    assert refused.value.code == "syntax"


@pytest.mark.parametrize("end", ["", "\\", "\\\n"])
def test_a_string_in_braces_that_is_not_closed_is_read_once(end: str) -> None:
    source = 'start: %json {"' + '\\"' * 32_000 + end
    assert check_lark(source, Limits()) == [(7, len(source))]
