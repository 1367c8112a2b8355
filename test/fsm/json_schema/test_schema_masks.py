"""Masks of a JSON schema accept a spelling of each of its instances, and no spelling of anything else."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trellis.errors import ConstraintError
from trellis.fsm import ConstraintSpec, Grammar, Vocabulary, compile_grammar

RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck))


def masks_accept(grammar: Grammar, text: str, vocabulary: Vocabulary) -> bool:
    """Token by token, so that the final check has no part in it."""
    matcher = grammar.matcher()
    return all(matcher.accept(token) for token in vocabulary.encode(text)) and matcher.is_accepting()


def compiled_or_refused(schema: Any, vocabulary: Vocabulary) -> Grammar | ConstraintError:
    try:
        return compile_grammar(ConstraintSpec.schema(schema), vocabulary)
    except ConstraintError as refusal:
        return refusal


def test_masks_agree_with_the_library_on_random_schemas(world: Any, tiny: Vocabulary) -> None:
    @settings(RELAXED, max_examples=120)
    @given(world.plain_schemas() | world.schemas(), st.lists(world.values, min_size=4, max_size=4))
    def run(schema: Any, values: list[Any]) -> None:
        library = jsonschema.Draft202012Validator(schema)
        grammar = compiled_or_refused(schema, tiny)
        if isinstance(grammar, ConstraintError):
            assert grammar.code in ("unsupported", "empty", "limit")
            assert grammar.code != "empty" or not any(library.is_valid(value) for value in values)
            return
        for value in values:
            expected = library.is_valid(value)
            accepted = [text for text in world.spellings(value) if masks_accept(grammar, text, tiny)]
            assert bool(accepted) == expected, (value, accepted)

    run()


CASES: list[tuple[str, Any, list[str], list[str]]] = [
    ("nullable", {"type": ["string", "null"]}, ['"a"', "null"], ["1"]),
    (
        "exclusive alternatives by a required property",
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": 1}', '{"b": 1}'],
        ["{}", '{"a": 1, "b": 1}', '{"b": 1, "a": 1}'],
    ),
    (
        "a tagged union",
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"t": {"const": "x"}, "v": {"type": "integer"}},
                    "required": ["t"],
                },
                {
                    "type": "object",
                    "properties": {"t": {"const": "y"}, "v": {"type": "null"}},
                    "required": ["t"],
                },
            ]
        },
        ['{"t": "x", "v": 1}', '{"t": "y", "v": null}', '{"t": "x"}'],
        ['{"t": "x", "v": null}', '{"t": "z"}', "{}"],
    ),
    (
        "a condition on a constant",
        {
            "type": "object",
            "properties": {"country": {"enum": ["US", "DE"]}, "zip": {"type": "string"}},
            "required": ["country", "zip"],
            "if": {"properties": {"country": {"const": "US"}}},
            "then": {"properties": {"zip": {"pattern": "^[0-9]{5}$"}}},
            "else": {"properties": {"zip": {"pattern": "^D-"}}},
        },
        ['{"country": "US", "zip": "12345"}', '{"country": "DE", "zip": "D-1"}'],
        ['{"country": "US", "zip": "D-1"}', '{"country": "DE", "zip": "12345"}'],
    ),
    (
        "what a property needs",
        {
            "type": "object",
            "properties": {"card": {}, "street": {}},
            "dependentRequired": {"card": ["street"]},
        },
        ["{}", '{"street": 1}', '{"card": 1, "street": 2}'],
        ['{"card": 1}'],
    ),
    (
        "not a constant",
        {"type": "string", "not": {"enum": ["", "no"]}},
        ['"n"', '"not"', '"yes"'],
        ['""', '"no"'],
    ),
    (
        "not an integer range",
        {"type": "integer", "not": {"minimum": 2, "maximum": 4}},
        ["1", "5"],
        ["2", "3", "4"],
    ),
    (
        "neither of two properties",
        {"type": "object", "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
        ["{}", '{"c": 1}'],
        ['{"a": 1}', '{"b": 1}', '{"c": 1, "a": 1}'],
    ),
    (
        "names by a pattern",
        {"type": "object", "propertyNames": {"pattern": "^x-"}, "additionalProperties": {"type": "integer"}},
        ["{}", '{"x-a": 1, "x-b": 2}'],
        ['{"a": 1}', '{"x-a": "1"}'],
    ),
    (
        "at least one property",
        {
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "additionalProperties": False,
            "minProperties": 1,
        },
        ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 2}'],
        ["{}", '{"c": 1}'],
    ),
    (
        "different members of an enum",
        {"type": "array", "items": {"enum": ["x", "y", 1]}, "uniqueItems": True},
        ["[]", '["y", "x"]', '["x", 1, "y"]'],
        ['["x", "x"]', '["z"]'],
    ),
    (
        "one item of a short array",
        {"type": "array", "contains": {"const": 1}, "maxItems": 3},
        ["[1]", "[0, 1]", '["a", null, 1]', "[1, 1]"],
        ["[]", "[0]", "[0, 0, 0]", "[0, 0, 0, 1]"],
    ),
    (
        "nothing unevaluated",
        {
            "type": "object",
            "properties": {"a": {}},
            "anyOf": [{"properties": {"b": {"const": 1}}, "required": ["b"]}, {"properties": {"c": {}}}],
            "unevaluatedProperties": False,
        },
        ['{"a": 1}', '{"a": 1, "b": 1}', '{"a": 1, "c": 1}', '{"b": 1, "c": 2}'],
        ['{"d": 1}', '{"a": 1, "b": 2}'],
    ),
    (
        "a recursion beside other keywords",
        {
            "$ref": "#/$defs/tree",
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {
                        "next": {"type": "object", "anyOf": [{"$ref": "#/$defs/tree"}], "required": ["v"]}
                    },
                }
            },
        },
        ["{}", '{"next": {"v": 1}}', '{"next": {"next": {"v": 1}, "v": 2}}'],
        ['{"next": {}}', '{"next": {"v": 1, "next": {}}}'],
    ),
    (
        "a dynamic reference",
        {
            "$id": "https://example.com/strict",
            "$dynamicAnchor": "node",
            "$ref": "tree",
            "unevaluatedProperties": False,
            "$defs": {
                "tree": {
                    "$id": "tree",
                    "$dynamicAnchor": "node",
                    "type": "object",
                    "properties": {"d": True, "c": {"type": "array", "items": {"$dynamicRef": "#node"}}},
                }
            },
        },
        ['{"c": [{"d": 1}]}'],
        ['{"c": [{"x": 1}]}', '{"x": 1}'],
    ),
    (
        "look-ahead in a pattern",
        {"type": "string", "pattern": r"^(?=.*[0-9])(?!.*x)[a-z0-9]{3,4}$"},
        ['"ab1"', '"1abc"'],
        ['"abc"', '"ab1x"', '"a1"'],
    ),
    (
        "patterns of names that overlap",
        {"type": "object", "patternProperties": {"^a": {"minimum": 2}, "b$": {"maximum": 5}}},
        ['{"a": 7}', '{"b": 1}', '{"ab": 3}'],
        ['{"ab": 1}', '{"ab": 6}', '{"a": 1}'],
    ),
    (
        "characters outside ASCII",
        {"enum": ["é", "日本", "😀"]},
        ['"é"', '"日本"', '"😀"'],
        ['"e"', '"\\u00e9"'],
    ),
    ("NUL", {"const": "a\0b"}, ['"a\\u0000b"'], ['"a"', '"a\0b"']),
    ("anything", True, ["1", '{"a": [null, "x"]}', "[]"], ["{", "", "tru"]),
]


@pytest.mark.parametrize(
    ("schema", "accept", "reject"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_case(schema: Any, accept: list[str], reject: list[str], tiny: Vocabulary) -> None:
    grammar = compile_grammar(ConstraintSpec.schema(json.dumps(schema)), tiny)
    for text in accept:
        assert grammar.accepts(text), text
        assert masks_accept(grammar, text, tiny), text
    for text in reject:
        assert not grammar.accepts(text), text
        assert not masks_accept(grammar, text, tiny), text
