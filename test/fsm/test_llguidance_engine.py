"""The llguidance engine: schemas, Lark grammars, and the meaning of patterns."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from trellis.errors import ConstraintError
from trellis.fsm import ChecksText, ConstraintSpec, Grammar, Matcher, Vocabulary, compile_grammar
from trellis.fsm.contract import Spacing

RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck))
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "house": {"enum": ["Gryffindor", "Größe", 'a "b"\n']},
        "tags": {"type": "array", "items": {"type": ["string", "null"]}, "maxItems": 3},
    },
    "required": ["name", "age", "house"],
    "additionalProperties": False,
}
ANNA = {"name": "Anna 東京", "age": 31, "house": 'a "b"\n', "tags": ["x", None]}
SEPARATORS: dict[str, tuple[str, str]] = {"spaced": (", ", ": "), "compact": (",", ":"), "any": (",", ":")}
ALPHABETS = 'ab "\\\n\té東😀{}[]:,0'


def text_of(value: Any, spacing: str = "spaced") -> str:
    return json.dumps(value, ensure_ascii=False, separators=SEPARATORS[spacing])


def schema(source: Any, vocabulary: Vocabulary, spacing: Spacing = "spaced", strict: bool = True) -> Grammar:
    return compile_grammar(ConstraintSpec.schema(source, spacing, strict), vocabulary)


def mask_of(matcher: Matcher, vocabulary: Vocabulary) -> np.ndarray:
    row = np.full(vocabulary.mask_words, -1, np.int32)
    assert matcher.fill_mask(row)
    return np.unpackbits(row.view(np.uint8), bitorder="little").astype(bool)[: vocabulary.size]


def accepted_by_tokens(grammar: Grammar, vocabulary: Vocabulary, text: str) -> bool:
    matcher = grammar.matcher()
    return all(map(matcher.accept, vocabulary.encode(text))) and matcher.is_accepting()


def test_auto_takes_llguidance_for_schemas_and_lark(tiny: Vocabulary) -> None:
    assert schema({"type": "null"}, tiny).engine == "llguidance"
    assert compile_grammar(ConstraintSpec.grammar('start: "a"'), tiny).engine == "llguidance"
    assert compile_grammar(ConstraintSpec.regex("a"), tiny).engine == "compressed"


@pytest.mark.parametrize("spacing", ["spaced", "compact", "any"])
def test_spacing(tiny: Vocabulary, spacing: Spacing) -> None:
    grammar = schema(PERSON, tiny, spacing)
    for written in ("spaced", "compact"):
        text = text_of(ANNA, written)
        wanted = spacing in (written, "any")
        assert grammar.accepts(text) == wanted
        assert accepted_by_tokens(grammar, tiny, text) == wanted


def test_any_spacing_is_bounded(tiny: Vocabulary) -> None:
    grammar = schema({"type": "array", "items": {"type": "integer"}}, tiny, "any")
    assert grammar.accepts("[ 1 ,\n\t2\r\n]")
    assert grammar.accepts("[1," + " " * 8 + "2]")
    assert not grammar.accepts("[1," + " " * 9 + "2]")
    matcher = grammar.matcher()
    assert all(map(matcher.accept, tiny.encode("[1," + "\n" * 8)))
    blanks = [i for i, data in enumerate(tiny.token_bytes) if data and not data.strip()]
    assert not mask_of(matcher, tiny)[blanks].any()


def test_text_stays_utf8_and_strings_may_hold_every_character(tiny: Vocabulary) -> None:
    grammar = schema({"enum": ["é", "漢字"]}, tiny)
    assert grammar.accepts('"é"')
    assert not grammar.accepts(r'"\u00e9"')
    free = schema({"type": "string"}, tiny)
    for text in ('"é漢字😀\u2028"', r'"\n\"\\\u001f"'):
        assert free.accepts(text)
    assert not free.accepts('"\n"')


def test_escapes_are_for_strings_and_never_hide_a_property(tiny: Vocabulary) -> None:
    escaped = r'"\u0061\uD83D\uDE00\u00e9"'
    assert schema({"type": "string", "maxLength": 3}, tiny).accepts(escaped)
    assert not schema({"type": "string", "maxLength": 2}, tiny).accepts(escaped)
    assert not schema({"type": "string"}, tiny).accepts(r'"\uD83D"')
    closed = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    assert schema(closed, tiny).accepts(rf'{{"a": {escaped}}}')
    for more in ({}, {"additionalProperties": {"type": "string"}}, {"patternProperties": {"^b": {}}}):
        declared = {"type": "object", "properties": {"a": {"type": "integer"}}, **more}
        for source in (declared, {"type": "array", "items": {"allOf": [declared, {"type": "object"}]}}):
            text = r'{"\u0061": "x"}' if source is declared else r'[{"\u0061": "x"}]'
            assert not accepted_by_tokens(schema(source, tiny), tiny, text)


def test_control_characters_that_need_a_u_escape(tiny: Vocabulary) -> None:
    """Next to open objects such escapes are off, so what cannot be said without them is refused, never left out."""
    opened = {"type": "object", "properties": {"a": {"type": "integer"}}}
    closed = {**opened, "additionalProperties": False}
    for literal in ({"enum": ["a\x01"]}, {"const": {"\x1f": 1}}, {"type": "string", "pattern": r"^a\u0001$"}):
        with pytest.raises(ConstraintError, match="control characters"):
            schema({"anyOf": [opened, literal]}, tiny)
        assert schema({"anyOf": [closed, literal]}, tiny).accepts('{"a": 1}')
    lines = schema({"anyOf": [opened, {"type": "string", "pattern": r"^a[\s\u0001]b$"}]}, tiny)
    assert lines.accepts(r'"a\nb"')
    assert not lines.accepts('"ab"')
    enum = schema(
        {
            "type": "object",
            "properties": {"enum": opened, "const": closed},
            "additionalProperties": False,
        },
        tiny,
    )
    assert not accepted_by_tokens(enum, tiny, r'{"enum": {"\u0061": "x"}}')


def test_properties_come_in_the_order_of_the_schema(tiny: Vocabulary) -> None:
    grammar = schema({"type": "object", "properties": {"b": {"const": 1}, "a": {"const": 2}}}, tiny)
    assert grammar.accepts('{"b": 1, "a": 2}')
    assert not grammar.accepts('{"a": 2, "b": 1}')


def test_a_fixed_schema_is_one_forced_run(tiny: Vocabulary) -> None:
    matcher = schema({"const": {"answer": [True, "because of the weather"]}}, tiny).matcher()
    run = matcher.forced()
    text = b"".join(tiny.token_bytes[token] for token in run)
    assert text == b'{"answer": [true, "because of the weather"]}'
    assert run == tiny.encode(text.decode())
    assert all(map(matcher.accept, run))
    assert matcher.is_finished()


# Random values of a fixed rich schema: every one is accepted, in canonical tokens, and forced runs never differ.
texts = st.text(st.sampled_from(ALPHABETS), max_size=6)
people = st.fixed_dictionaries(
    {"name": texts, "age": st.integers(0, 150), "house": st.sampled_from(["Gryffindor", "Größe", 'a "b"\n'])},
    optional={"tags": st.lists(st.one_of(texts, st.none()), max_size=3)},
).map(lambda person: {name: person[name] for name in PERSON["properties"] if name in person})


@settings(RELAXED, max_examples=60)
@given(person=people, spacing=st.sampled_from(["spaced", "compact", "any"]))
def test_valid_values_are_accepted_and_forced_tokens_are_theirs(
    tiny: Vocabulary, person: dict[str, Any], spacing: Spacing
) -> None:
    grammar = schema(PERSON, tiny, spacing)
    text = text_of(person, spacing)
    assert grammar.accepts(text)
    assert isinstance(grammar, ChecksText)
    assert grammar.validate(text) is None
    ids = tiny.encode(text)
    matcher = grammar.matcher()
    for i, token in enumerate(ids):
        run = matcher.forced()
        assert run == ids[i : i + len(run)]
        assert matcher.accept(token)
    assert matcher.is_finished()


@settings(RELAXED, max_examples=60)
@given(person=people, data=st.data())
def test_what_the_schema_forbids_is_rejected(
    tiny: Vocabulary, person: dict[str, Any], data: st.DataObject
) -> None:
    wrong = data.draw(
        st.sampled_from(
            [{"age": 151}, {"age": -1}, {"age": 1.5}, {"house": "Hufflepuff"}, {"name": 3}, {"x": 1}]
        )
    )
    value = {**person, **wrong}
    assert not jsonschema.Draft202012Validator(PERSON).is_valid(value)
    grammar = schema(PERSON, tiny)
    assert not grammar.accepts(text_of(value))
    assert not accepted_by_tokens(grammar, tiny, text_of(value))
    assert isinstance(grammar, ChecksText)
    assert grammar.validate(text_of(value))


@pytest.mark.parametrize("spec", [ConstraintSpec.schema(PERSON), ConstraintSpec.grammar("start: /(.|\\n)*/")])
def test_special_tokens_are_never_allowed(model_vocabulary: Vocabulary, spec: ConstraintSpec) -> None:
    grammar = compile_grammar(spec, model_vocabulary)
    silent = [i for i, data in enumerate(model_vocabulary.token_bytes) if not data]
    silent = [token for token in silent if token not in model_vocabulary.eos_token_ids]
    rng = random.Random(1)
    matcher = grammar.matcher()
    assert len(silent) > 10
    for _ in range(40):
        mask = mask_of(matcher, model_vocabulary)
        assert not mask[silent].any()
        assert not any(map(matcher.accept, silent))
        allowed = [t for t in np.flatnonzero(mask).tolist() if t not in model_vocabulary.eos_token_ids]
        if not allowed:
            break
        assert matcher.accept(rng.choice(allowed))


def test_several_end_tokens_and_twins(tiny: Vocabulary) -> None:
    """Ids with the same bytes are allowed together, and so are all ids that end a text."""
    data = [*tiny.token_bytes, tiny.token_bytes[tiny.encode("a")[0]], b"", b""]
    size = len(data) + 3
    eos = frozenset({*tiny.eos_token_ids, len(data) - 1})
    doubled = replace(tiny, token_bytes=data, size=size, eos_token_ids=eos, fingerprint="doubled")
    grammar = compile_grammar(ConstraintSpec.grammar('start: "a" | "ab"'), doubled)
    matcher = grammar.matcher()
    twin = len(data) - 3
    assert mask_of(matcher, doubled)[twin]
    assert not mask_of(matcher, doubled)[sorted(eos)].any()
    assert matcher.accept(twin)
    assert mask_of(matcher, doubled)[sorted(eos)].all()
    assert not mask_of(matcher, doubled)[len(data) :].any()
    assert matcher.accept(len(data) - 1)
    assert matcher.is_finished()


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        (ConstraintSpec.schema(False), "empty"),
        (ConstraintSpec.schema({"$ref": "#"}), "syntax"),
        (ConstraintSpec.schema("{"), "syntax"),
        (ConstraintSpec.schema({"type": "string", "pattern": "a("}), "syntax"),
        (ConstraintSpec.grammar('start: "a" foo'), "syntax"),
        (ConstraintSpec.grammar("start: /a(/"), "syntax"),
        (ConstraintSpec.grammar("start: /(?=a)b/"), "syntax"),
        (ConstraintSpec.grammar('begin: "a"'), "syntax"),
        (ConstraintSpec.grammar('start: %json {"uniqueItems": true}'), "unsupported"),
        (ConstraintSpec.grammar("start: x\nx: start"), "empty"),
        (ConstraintSpec.grammar("start: T\nT: /a/ & /b/"), "empty"),
        (ConstraintSpec.grammar("start: <|im_end|>"), "unsupported"),
        (ConstraintSpec.grammar("start: " + "(" * 500 + '"a"' + ")" * 500), "limit"),
    ],
    ids=lambda value: getattr(value, "source", value)[:40],
)
def test_refusals(tiny: Vocabulary, spec: ConstraintSpec, code: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        compile_grammar(spec, tiny)
    assert (caught.value.kind, caught.value.code) == (spec.kind, code)
    assert "\n" not in caught.value.detail
    assert "backtrace" not in str(caught.value)


def test_a_lark_refusal_says_where(tiny: Vocabulary) -> None:
    with pytest.raises(ConstraintError) as caught:
        compile_grammar(ConstraintSpec.grammar('start: "a"\n  | b\n'), tiny)
    assert caught.value.where.startswith("line ")
    assert "unknown name" in caught.value.detail
    with pytest.raises(ConstraintError) as caught:
        compile_grammar(ConstraintSpec.grammar('start: a\na: %json {"items": {"uniqueItems": true}}'), tiny)
    assert (caught.value.kind, caught.value.where) == ("grammar", "line 2, column 4: #/items")


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: "(" start ")" | "x"', ["x", "((x))"], ["(x", "()", "xx"]),
        ('start: "a"i B+\nB: /[0-9]/', ["a1", "A12"], ["1", "b1"]),
        (
            'start: %json {"type": "array", "items": {"type": "integer"}} | "none"',
            ["none", "[1, 2]"],
            ["[", "[a]"],
        ),
        ("start: T\nT: ~/ab/ & /[a-z]{2}/", ["cd", "aa"], ["ab", "abc"]),
        ('start: A | B\nA: "list"\nB: "listen"', ["list", "listen"], ["liste"]),
    ],
)
def test_lark_grammars(tiny: Vocabulary, grammar: str, good: list[str], bad: list[str]) -> None:
    compiled = compile_grammar(ConstraintSpec.grammar(grammar), tiny)
    for text in good:
        assert compiled.accepts(text)
        assert accepted_by_tokens(compiled, tiny, text)
    for text in bad:
        assert not compiled.accepts(text)
        assert not accepted_by_tokens(compiled, tiny, text)


@settings(RELAXED, max_examples=150)
@given(data=st.data())
def test_patterns_mean_the_same_in_both_engines_and_in_re(
    patterns: Any, tiny: Vocabulary, data: st.DataObject
) -> None:
    pattern = data.draw(patterns.strategy)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    try:
        ours = compile_grammar(ConstraintSpec.regex(pattern.text), tiny, "compressed")
        theirs = compile_grammar(ConstraintSpec.regex(pattern.text), tiny, "llguidance")
    except ConstraintError as error:
        assume(error.code not in ("unsupported", "empty"))
        raise
    for text in patterns.texts(pattern, rng, 8):
        wanted = re.fullmatch(pattern.text, text) is not None
        assert ours.accepts(text) == theirs.accepts(text) == wanted, text
        assert accepted_by_tokens(theirs, tiny, text) == wanted, text


def test_the_engines_agree_on_masks(tiny: Vocabulary) -> None:
    """Along random texts of a pattern both allow the same tokens, where neither is in a forced run."""
    pattern = r'\{"[a-z]{1,4}": (\d{1,3}|"[^"\n]{0,5}")\}'
    spec = ConstraintSpec.regex(pattern)
    ours, theirs = (compile_grammar(spec, tiny, name) for name in ("compressed", "llguidance"))
    rng = random.Random(5)
    compared = 0
    for _ in range(10):
        a, b = ours.matcher(), theirs.matcher()
        while not a.is_finished():
            if not a.forced() and not b.forced():
                assert np.array_equal(mask_of(a, tiny), mask_of(b, tiny))
                compared += 1
            choices = np.flatnonzero(mask_of(a, tiny) & mask_of(b, tiny)).tolist()
            token = rng.choice([t for t in choices if t not in tiny.eos_token_ids])
            assert a.accept(token)
            assert b.accept(token)
    assert compared > 20


def test_a_failed_parser_is_replaced(tiny: Vocabulary) -> None:
    """When a parser's tables are full, a fresh one takes over at the same position."""
    grammar = schema(PERSON, tiny)
    matcher: Any = grammar.matcher()
    assert all(map(matcher.accept, tiny.encode('{"name": "An')))
    before = mask_of(matcher, tiny)
    matcher._parser.consume_token(
        min(tiny.eos_token_ids)
    )  # not allowed here: the parser is of no use any more
    matcher._mask = None
    assert matcher._parser.is_error()
    assert np.array_equal(mask_of(matcher, tiny), before)
    assert matcher.accept(tiny.encode("n")[0])
    matcher.rollback(2)
    assert not matcher.is_accepting()


def test_a_parser_that_fails_again_ends_in_a_constraint_error(
    tiny: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def deep_copy(self) -> Broken:
            return self

        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return "ParserTooComplex\n<state>"

        def __getattr__(self, name: str) -> Callable[..., bool]:
            return lambda *_: False

    grammar: Any = schema(PERSON, tiny)
    monkeypatch.setattr(grammar, "_parser", Broken())
    matcher = grammar.matcher()
    with pytest.raises(ConstraintError) as caught:
        matcher.fill_mask(np.zeros(tiny.mask_words, np.int32))
    assert (caught.value.kind, caught.value.code) == ("schema", "limit")
    assert "ParserTooComplex" in caught.value.detail


@pytest.mark.parametrize("kind", ["schema", "grammar"])
def test_long_chains_of_definitions_do_not_overflow_a_stack(tiny: Vocabulary, kind: str) -> None:
    n = 2500
    if kind == "schema":
        links = {str(i): {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(n)}
        spec = ConstraintSpec.schema({"$ref": "#/$defs/0", "$defs": {**links, str(n): {"type": "null"}}})
        text = "[[[[[]"
    else:
        rules = [f'a{i}: "[" a{i + 1} | "x"' for i in range(n)]
        spec = ConstraintSpec.grammar("\n".join(["start: a0", *rules, f'a{n}: "y"']))
        text = "[[[[[x"
    found: list[bool] = []

    def work() -> None:
        matcher = compile_grammar(spec, tiny).matcher()
        found.append(all(map(matcher.accept, tiny.encode(text))))

    thread = threading.Thread(target=work)  # its stack is smaller than that of the main thread may be
    thread.start()
    thread.join()
    assert found == [True]


def test_grammars_say_how_large_they_are(tiny: Vocabulary) -> None:
    small, large = (
        schema({"type": "null"}, tiny),
        schema({"enum": [f"option {i}" for i in range(5000)]}, tiny),
    )
    assert 0 < small.nbytes < large.nbytes


def test_strict_off_says_what_is_only_validated(tiny: Vocabulary) -> None:
    source = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(ConstraintError) as caught:
        schema(source, tiny)
    assert caught.value.code == "unsupported"
    assert "uniqueItems" in caught.value.detail
    grammar = schema(source, tiny, strict=False)
    assert isinstance(grammar, ChecksText)
    assert any("uniqueItems" in each for each in grammar.validated_only)
    assert grammar.validate("[1, 2]") is None
    assert grammar.validate("[1, 1]")
    assert accepted_by_tokens(grammar, tiny, "[1, 1]")
    assert not grammar.accepts("[1, 1]")
