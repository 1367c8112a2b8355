"""GBNF: what it means, what is refused and where, and what trimming does. No parser library is needed."""

from __future__ import annotations

import pytest

from trellis.errors import ConstraintError
from trellis.fsm import ConstraintSpec, Limits, Vocabulary, compile_grammar
from trellis.fsm.charset import EVERYTHING, complement, single, union
from trellis.fsm.dialect import engine_kind
from trellis.fsm.gbnf import EMPTY, Alt, Chars, Ref, Repeat, Seq, parse
from trellis.fsm.gbnf_rules import check_lengths, check_size, shortest, trim, write
from trellis.fsm.limits import Budget


def budget() -> Budget:
    return Budget("grammar", Limits())


def chars(text: str) -> Chars:
    return Chars(union(single(ord(char)) for char in text))


@pytest.mark.parametrize(
    ("body", "node"),
    [
        ('"a"', chars("a")),
        ('"ab"', Seq((chars("a"), chars("b")))),
        ('""', EMPTY),
        ('"a" |', Alt((chars("a"), EMPTY))),
        ("[a-c]", chars("abc")),
        ("[^a]", Chars(complement(single(97)))),
        ("[^]", Chars(EVERYTHING)),
        (".", Chars(EVERYTHING)),
        ("[-a]", chars("-a")),
        ("[a-]", chars("-a")),
        (r"[\]\\\-]", chars("]\\-")),
        (r'"\n\t\r\"\x41\u00e9\U0001F600"', Seq(tuple(chars(c) for c in '\n\t\r"Aé😀'))),
        ('"#" # not a string\n "|"', Seq((chars("#"), chars("|")))),
        ('"a"*', Repeat(chars("a"), 0, None)),
        ('"a" +', Repeat(chars("a"), 1, None)),
        ('"a"?', Repeat(chars("a"), 0, 1)),
        ('"a"{3}', Repeat(chars("a"), 3, 3)),
        ('"a"{3,}', Repeat(chars("a"), 3, None)),
        ('"a"{,3}', Repeat(chars("a"), 0, 3)),
        ('"a"{0}', Repeat(chars("a"), 0, 0)),
        ('"a"{0,0}', Repeat(chars("a"), 0, 0)),
        ('"a"{' + "0" * 5000 + "12}", Repeat(chars("a"), 12, 12)),
        ('"a"{ 1 , 2 }?', Repeat(Repeat(chars("a"), 1, 2), 0, 1)),
        ('("a" | "b") root', Seq((Alt((chars("a"), chars("b"))), Ref("root")))),
        ("root " + "#" * 3000 + '\n | "a"', Alt((Ref("root"), chars("a")))),
        ('"a"\n  | "b"\n', Alt((chars("a"), chars("b")))),
    ],
)
def test_the_meaning_of_a_rule(body: str, node: object) -> None:
    assert parse(f"root ::= {body}", Limits()) == {"root": node}


def test_rules_follow_each_other_without_a_separator() -> None:
    rules = parse(
        "# a comment\nroot ::= other-one other_2\nother-one ::= 'x' # no\nother_2 ::=\n".replace("'", '"'),
        Limits(),
    )
    assert rules == {
        "root": Seq((Ref("other-one"), Ref("other_2"))),
        "other-one": chars("x"),
        "other_2": EMPTY,
    }


@pytest.mark.parametrize(
    ("text", "code", "where", "words"),
    [
        ("", "syntax", "", "called root"),
        ('other ::= "a"', "syntax", "", "called root"),
        ('root = "a"', "syntax", "line 1, column 1", "::="),
        ('root ::= "a"\nroot ::= "b"', "syntax", "line 2, column 1", "twice"),
        ('root ::= "a\n"', "syntax", "line 1, column 10", "never closed"),
        ('root ::= "a" [b', "syntax", "line 1, column 14", "never closed"),
        ('root ::= ("a"', "syntax", "line 1, column 10", "never closed"),
        ('root ::= "a")', "syntax", "line 1, column 13", "closes nothing"),
        ("root ::= []", "syntax", "line 1, column 10", "empty class"),
        ("root ::= [z-a]", "syntax", "line 1, column 11", "range z-a"),
        ("root ::=\n  foo", "syntax", "line 2, column 3", "'foo'"),
        (r'root ::= "\q"', "syntax", "line 1, column 11", "escape"),
        (r'root ::= "\xg1"', "syntax", "line 1, column 11", "hexadecimal"),
        (r'root ::= "\u12"', "syntax", "line 1, column 11", "hexadecimal"),
        (r'root ::= "\ud800"', "syntax", "line 1, column 11", "no character"),
        (r'root ::= "\U00110000"', "syntax", "line 1, column 11", "no character"),
        ('root ::= "a"{2,1}', "syntax", "line 1, column 13", "at most 1"),
        ('root ::= "a"{x}', "syntax", "line 1, column 13", "{m,n}"),
        ('root ::= "a"{}', "syntax", "line 1, column 13", "{m,n}"),
        ('root ::= * "a"', "syntax", "line 1, column 10", "cannot stand here"),
        ('root ::= "a\0"', "syntax", "line 1, column 12", "NUL"),
        ('root ::= "a\ud800"', "syntax", "line 1, column 12", "surrogate"),
        ("root ::= <think>", "unsupported", "line 1, column 10", "token"),
        ("root ::= /[a-z]/", "unsupported", "line 1, column 10", "slashes"),
        ('root ::= "a" (= "b")', "unsupported", "line 1, column 14", "look-ahead"),
        ('root ::= "a"{2 3}', "syntax", "line 1, column 13", "{m,n}"),
        ('root ::= "a"{10001}', "limit", "line 1, column 13", "10000"),
        ('root ::= "a"{' + " " * 60_000, "syntax", "line 1, column 13", "{m,n}"),
        ('root ::= "a"{1000000001}', "limit", "line 1, column 13", "10000"),
        ('root ::= "a"{3,' + "9" * 5000 + "}", "limit", "line 1, column 13", "10000"),
        ("root ::= " + "(" * 65 + '"a"' + ")" * 65, "limit", "line 1, column 74", "64 deep"),
    ],
)
def test_what_is_no_grammar_is_refused_at_its_place(text: str, code: str, where: str, words: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        parse(text, Limits())
    assert (caught.value.code, caught.value.where) == (code, where)
    assert words in caught.value.detail


def test_what_never_ends_is_trimmed() -> None:
    text = (
        'root ::= "a" | "b" loop | ("c" loop)? | "d" other\nloop ::= "x" loop\nother ::= "y"\nspare ::= "z"'
    )
    trimmed = trim(parse(text, Limits()), EVERYTHING, budget())
    assert set(trimmed) == {"root", "other"}
    assert trimmed["root"] == Alt((chars("a"), EMPTY, Seq((chars("d"), Ref("other")))))


def test_what_cannot_be_written_is_trimmed() -> None:
    text = 'root ::= "aé" | [éb] | "c"'
    trimmed = trim(parse(text, Limits()), complement(single(0xE9)), budget())
    assert trimmed == {"root": Alt((chars("b"), chars("c")))}
    assert trim(parse('root ::= "é"', Limits()), complement(single(0xE9)), budget()) == {}


def test_the_shortest_text_of_each_rule() -> None:
    text = 'root ::= a a{3} | root root\na ::= "xyz" | b b\nb ::= "q" | a\nloop ::= loop "x"\nnone ::= ""'
    assert shortest(parse(text, Limits()), budget()) == {"root": 8, "a": 2, "b": 1, "none": 0}


def test_rules_that_double_each_other_are_refused() -> None:
    """Thirty rules would force a text of a billion characters."""
    lines = [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(30)]
    rules = parse("\n".join(["root ::= r0", *lines, 'r30 ::= "x"']), Limits())
    check_size(rules, Limits())
    with pytest.raises(ConstraintError, match="shortest text of rule") as caught:
        check_lengths(rules, Limits(), budget())
    assert caught.value.code == "limit"


def test_nested_repeats_count_as_what_they_unroll_to() -> None:
    with pytest.raises(ConstraintError, match="1000000 places") as caught:
        check_size(parse("root ::= ((.{0,100}){0,100}){0,100}", Limits()), Limits())
    assert caught.value.code == "limit"


def test_written_rules_are_read_back_as_they_were() -> None:
    text = r'root ::= "a-\"]é😀" [^\\\]\[^-] (x{2,3} | x* x+ x? x{4,})' + '\nx ::= "" | "\\n" root'
    rules = parse(text, Limits())
    again = parse(write(rules), Limits())
    assert again.pop("root") == Ref("r0")
    renamed = parse(text.replace("root", "r0").replace("x", "r1") + '\nroot ::= ""', Limits())
    assert again == {name: node for name, node in renamed.items() if name != "root"}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('root ::= "a"', "ebnf"),
        ('# start: "a"\n\nmy-rule\n ::= "a: b"', "ebnf"),
        ('start: "root ::= x"', "grammar"),
        ('%llguidance {}\nstart: "a"', "grammar"),
        ('// root ::= "a"\n?start: x\nx: "a"', "grammar"),
        ('start[capture="x"]: "a"', "grammar"),
        ('TERM.2: "a"\nstart: TERM', "grammar"),
    ],
)
def test_the_dialect_is_told_by_the_first_rule(text: str, kind: str) -> None:
    assert engine_kind(ConstraintSpec.grammar(text)) == kind


@pytest.mark.parametrize("text", ["", "hello", "root = 'a'", '{"type": "object"}', "# only a comment"])
def test_neither_dialect_is_refused(tiny: Vocabulary, text: str) -> None:
    with pytest.raises(ConstraintError, match="neither a Lark grammar") as caught:
        compile_grammar(ConstraintSpec.grammar(text), tiny)
    assert caught.value.code == "syntax"


@pytest.mark.parametrize("backend", ["compressed", "llguidance"])
def test_an_engine_without_gbnf_says_which_has_it(tiny: Vocabulary, backend: str) -> None:
    with pytest.raises(ConstraintError, match=r"GBNF.*xgrammar: ebnf") as caught:
        compile_grammar(ConstraintSpec.grammar('root ::= "a"'), tiny, backend)
    assert (caught.value.kind, caught.value.code) == ("grammar", "unsupported")


def test_without_the_extra_the_message_says_what_to_install(
    tiny: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trellis.fsm.xgrammar_engine.find_spec", lambda _: None)
    with pytest.raises(ConstraintError, match=r"trellis-lm\[ebnf\]") as caught:
        compile_grammar(ConstraintSpec.grammar('root ::= "a"'), tiny)
    assert caught.value.code == "unsupported"
    with pytest.raises(ConstraintError, match="never closed"):
        compile_grammar(ConstraintSpec.grammar('root ::= "a'), tiny)
