"""Schemas that once were lowered wrongly, or that cost more than they may: what they must come to now."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from trellis.errors import ConstraintError
from trellis.fsm import ConstraintSpec, Vocabulary, compile_grammar
from trellis.fsm.json_schema import prepare
from trellis.fsm.json_schema.regular import PatternAlgebra

LATEST = jsonschema.Draft202012Validator


def accepts(schema: Any, text: str, vocabulary: Vocabulary) -> bool:
    """By masks alone."""
    matcher = compile_grammar(ConstraintSpec.schema(schema), vocabulary).matcher()
    return all(matcher.accept(token) for token in vocabulary.encode(text)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        # Named properties are not additional, though their names match the pattern for names.
        (
            {
                "properties": {"c": {"type": "object"}},
                "additionalProperties": {"type": "integer"},
                "propertyNames": {"minLength": 1},
            },
            {"c": {}},
        ),
        # Two patterns that become one when names are confined hold both.
        (
            {
                "patternProperties": {"^[ab]+$": {"type": "string"}, "a|^b": {"type": "object"}},
                "propertyNames": {"maxLength": 1},
            },
            {"b": {}},
        ),
        ({"propertyNames": {"minLength": 1}}, {"\n": 1}),
    ],
)
def test_lowering_keeps_the_answer(schema: Any, value: Any) -> None:
    prepared = prepare(json.dumps(schema))
    assert LATEST(prepared.schema).is_valid(value) == LATEST(schema).is_valid(value)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        # The engine reads keywords in order; what belongs together must stand together.
        (
            {"additionalProperties": False, "anyOf": [{"maxProperties": 2}], "patternProperties": {"^a": {}}},
            '{"a": 1}',
        ),
        ({"items": {"type": "null"}, "anyOf": [{"minItems": 1}], "prefixItems": [{}]}, "[1, null]"),
        # A class of a combined pattern must not spell surrogates.
        (
            {
                "patternProperties": {r"^\S+$": {"type": "integer"}},
                "propertyNames": {"minLength": 2},
                "type": "object",
            },
            '{"ab": 1}',
        ),
        ({"type": "integer", "maximum": 2**63 - 1}, str(2**63 - 1)),
        ({"enum": [1e20]}, "100000000000000000000"),
    ],
)
def test_masks_accept_what_is_valid(schema: Any, text: str, tiny: Vocabulary) -> None:
    assert LATEST(schema).is_valid(json.loads(text))
    assert accepts(schema, text, tiny)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "number", "minimum": 2**53 + 1}, str(2**53)),
        ({"type": "integer", "minimum": 2**53 + 1}, str(2**53)),
        ({"type": "integer", "exclusiveMinimum": 2**53}, str(2**53)),
        ({"type": "number", "maximum": 2**60}, str(2**60 + 1)),
    ],
)
def test_bounds_that_are_no_doubles_let_nothing_more_through(
    schema: Any, text: str, tiny: Vocabulary
) -> None:
    assert not LATEST(schema).is_valid(json.loads(text))
    assert not accepts(schema, text, tiny)
    assert "is enforced as" in prepare(json.dumps(schema)).warnings[0] or schema.get("maximum") == 2**60


def test_no_comma_leads_into_a_dead_end(tiny: Vocabulary) -> None:
    """All names that a pattern allows are taken: another property must not be begun."""
    schema = {
        "type": "object",
        "propertyNames": {"enum": ["b", "ab"]},
        "anyOf": [{"required": ["b", "ab"]}, {"properties": {"b": False}}],
    }
    assert accepts(schema, '{"ab": 1, "b": 2}', tiny) or accepts(schema, '{"b": 1, "ab": 2}', tiny)
    for text in ('{"ab": 1, "b": 2,', '{"b": 1, "ab": 2,'):
        matcher = compile_grammar(ConstraintSpec.schema(schema), tiny).matcher()
        assert not all(matcher.accept(token) for token in tiny.encode(text))


@pytest.mark.parametrize(
    ("schema", "code"),
    [
        ({"contains": {"const": 1}, "minContains": 10**9, "maxItems": 10**10}, "unsupported"),
        ({"contains": {"const": 1}, "minContains": 10**9, "maxItems": 10**9}, "unsupported"),
        ({"not": {"prefixItems": [{"type": "null"}] * 5_000}}, "unsupported"),
        ({"not": {"enum": [[1] * 50_000]}}, "unsupported"),
        ({"not": {"items": {"type": "null"}, "prefixItems": [True]}, "maxItems": 10**9}, "unsupported"),
        ({"not": {"oneOf": [{"minimum": i} for i in range(5_000)]}}, "unsupported"),
        ({"type": "array", "items": {"enum": list(range(9_000))}, "uniqueItems": True}, "unsupported"),
        ({"multipleOf": 99_999_989}, "unsupported"),
        ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, "unsupported"),
        ({"type": "integer", "minimum": 10**18}, "unsupported"),
        ({"enum": [2**53 + 1]}, "unsupported"),
        ({"required": [str(i) for i in range(20_000)], "type": "object"}, "limit"),
        ({"patternProperties": {f"^x{i}": {} for i in range(1_000)}}, "limit"),
        ({"$ref": "#/allOf/" + "9" * 5_000, "allOf": [{}]}, "syntax"),
        (
            {
                "$ref": "#/$defs/d0",
                "$defs": {
                    **{f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3_000)},
                    "d3000": {"type": "null"},
                },
            },
            "limit",
        ),
        (
            {
                "$defs": {f"d{i}": {"$dynamicAnchor": f"d{i}"} for i in range(500)},
                "items": {"$dynamicRef": "#d1"},
            },
            "limit",
        ),
    ],
    ids=range(16),
)
def test_what_would_cost_too_much_is_refused_before(schema: Any, code: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        prepare(json.dumps(schema))
    assert caught.value.code == code


@pytest.mark.parametrize("depth", [60])
def test_references_that_fan_out_are_followed_once(depth: int) -> None:
    """2 ** 60 paths lead to the same definition: in lowering, and in the check of a text."""
    definitions: dict[str, Any] = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)
    }
    definitions[f"d{depth}"] = {"type": "string"}
    prepared = prepare(json.dumps({"$ref": "#/$defs/d0", "enum": ["a", 1], "$defs": definitions}))
    assert prepared.validate('"a"') is None
    assert prepared.validate("1")


@pytest.mark.parametrize(
    ("keyword", "inner", "text"),
    [
        ("unevaluatedProperties", {"properties": {"a": True}}, '{"a": 1}'),
        ("unevaluatedItems", {"prefixItems": [True]}, "[1]"),
    ],
)
def test_nested_unevaluated_is_decided_once(keyword: str, inner: Any, text: str) -> None:
    schema: Any = inner
    for _ in range(30):
        schema = {"allOf": [schema], keyword: {"type": "string"}}
    assert prepare(json.dumps(schema)).validate(text) is None


def test_a_text_that_is_nested_deeply_is_an_answer_and_no_crash() -> None:
    prepared = prepare('{"items": {"$ref": "#"}, "type": "array"}')
    for depth in (10, 300, 900, 5_000):
        verdict = prepared.validate("[" * depth + "]" * depth)
        assert verdict is None or "nested too deeply" in verdict
    assert prepared.validate("[" * 10 + "]" * 10) is None


def test_patterns_with_few_texts_are_told_from_others() -> None:
    algebra = PatternAlgebra()
    assert algebra.texts(r"^(?:b|ab)\Z", 9) == ["b", "ab"]
    assert algebra.texts(r"^\Z", 9) == [""]
    assert len(algebra.texts(r"^[a-c]{0,2}\Z", 13) or ()) == 13
    for pattern in (r"^[a-c]{0,2}\Z", r"^a*\Z", "^a", r"a\Z"):
        assert algebra.texts(pattern, 12) is None
