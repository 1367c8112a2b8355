"""What is wrong with a schema, or cannot be enforced, is said with its place; nothing is dropped silently."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trellis.errors import ConstraintError
from trellis.fsm import Limits
from trellis.fsm.json_schema import prepare

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"


def refusal(schema: Any, strict: bool = True, limits: Limits | None = None) -> ConstraintError:
    source = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(ConstraintError) as caught:
        prepare(source, strict, limits)
    return caught.value


def inside(schema: Any) -> Any:
    return {"type": "object", "properties": {"xs": schema}}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "string"}}, "contains"),
        ({"type": "string", "format": "topic"}, "format"),
        ({"type": "string", "pattern": r"\bword\b"}, "pattern"),
        ({"type": "string", "pattern": r"(a)\1"}, "pattern"),
        ({"not": {"multipleOf": 2}, "type": "integer"}, "not"),
        ({"not": {"type": "integer"}, "type": "number"}, "not"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"patternProperties": {"(?<=a)b": {}}}, "patternProperties"),
        ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}], "type": "integer"}, "oneOf"),
    ],
)
def test_the_keyword_and_its_place_are_named(schema: Any, keyword: str) -> None:
    for document, where in ((schema, "#"), (inside(schema), "#/properties/xs")):
        error = refusal(document)
        assert error.code == "unsupported"
        assert f"keyword {keyword!r} cannot be enforced" in error.detail
        assert error.where.startswith(where)


@pytest.mark.parametrize(
    ("schema", "where", "what"),
    [
        ({"type": "strin"}, "#/type", "unknown type 'strin'"),
        ({"properties": {"a": {"required": True}}}, "#/properties/a/required", "list of property names"),
        ({"minItems": -1}, "#/minItems", "whole number"),
        ({"maxLength": 2.5}, "#/maxLength", "whole number"),
        ({"pattern": "(("}, "#/pattern", "missing )"),
        ({"items": 3}, "#/items", "a schema is an object"),
        ({"allOf": {}}, "#/allOf", "list of schemas"),
        ({"$ref": "#/$defs/x"}, "#/$ref", "leads nowhere"),
        ({"$ref": "#"}, "#", "leads back to itself"),
        (
            {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
            "#/$defs/a",
            "leads back",
        ),
        ('{"const": "\\ud800"}', "#/const", "lone surrogate"),
        ('{"pattern": "\\\\udc00"}', "#/pattern", "lone surrogate"),
        ('{"a": NaN}', "", "NaN"),
        ('{"const": 1e999}', "", "too large"),
        ('{"const": ', "position 10", "not valid JSON"),
        ("[]", "#", "a schema is an object"),
    ],
)
def test_malformed_schemas(schema: Any, where: str, what: str) -> None:
    error = refusal(schema)
    assert (error.code, error.where) == ("syntax", where)
    assert what in error.detail


@pytest.mark.parametrize("reference", ["https://example.com/s.json", "file:///etc/passwd", "other.json#/a"])
def test_nothing_is_ever_fetched(reference: str) -> None:
    error = refusal(inside({"$ref": reference}))
    assert error.code == "unsupported"
    assert "only local references" in error.detail
    assert error.where == "#/properties/xs/$ref"


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"not": {}},
        {"enum": []},
        {"oneOf": [{}, {}]},
        {"type": "object", "required": ["n"], "properties": {"n": {"$ref": "#"}}},
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
        {"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}},
    ],
)
def test_schemas_without_a_finite_value(schema: Any) -> None:
    assert refusal(schema).code == "empty"
    assert refusal(schema, strict=False).code == "empty"


def test_an_endless_alternative_is_left_out() -> None:
    node = {"type": "object", "required": ["n"], "properties": {"n": {"$ref": "#/$defs/node"}}}
    prepared = prepare(
        json.dumps({"anyOf": [{"$ref": "#/$defs/node"}, {"const": 1}], "$defs": {"node": node}})
    )
    assert "node" not in json.dumps(prepared.schema)
    assert prepared.validate("1") is None


def nested(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "limits", "what"),
    [
        ({"enum": ["x" * 300_000]}, Limits(), "300014 bytes"),
        (nested(65), Limits(), "nest deeper than 64"),
        ("[" * 100_000, Limits(), "192 brackets"),
        ({"anyOf": [{}] * 30}, Limits(subschemas=20), "more than 20 schemas"),
        ({"properties": {f"p{i}": {} for i in range(11)}}, Limits(properties=10), "at most 10"),
        (
            {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(5)]} for i in range(8)]},
            Limits(),
            "combine",
        ),
    ],
)
def test_limits(schema: Any, limits: Limits, what: str) -> None:
    error = refusal(schema, limits=limits)
    assert error.code == "limit"
    assert what in error.detail


def test_the_work_of_lowering_is_bounded() -> None:
    """Alternatives that would have to be compared each with each, in CPU time."""
    overlapping = {
        "oneOf": [{"properties": {f"p{j}": {"type": "string"} for j in range(i, i + 9)}} for i in range(120)]
    }
    assert refusal(overlapping, limits=Limits(compile_s=0.1)).code == "timeout"


def test_a_property_named_like_a_keyword_is_a_property() -> None:
    schema = {
        "type": "object",
        "properties": {"uniqueItems": {"type": "boolean"}, "$ref": {}, "not": {}, "enum": {}},
    }
    assert (
        prepare(json.dumps(schema)).schema["$defs"]["0"]["properties"].keys() == schema["properties"].keys()
    )


def test_constants_and_annotations_are_not_inspected() -> None:
    schema = {
        "enum": [{"$ref": "nowhere", "uniqueItems": True}, 2],
        "default": {"not": 1},
        "examples": [{"type": "x"}],
    }
    prepared = prepare(json.dumps(schema))
    assert prepared.validate('{"$ref": "nowhere", "uniqueItems": true}') is None
    assert prepared.validate("3")
    assert prepared.warnings == []


def test_options_of_the_engine_do_not_pass_through() -> None:
    assert "x-guidance" not in json.dumps(
        prepare('{"x-guidance": {"lenient": true}, "type": "string"}').schema
    )


@pytest.mark.parametrize(
    ("schema", "warning"),
    [
        ({"nullable": True}, "unknown keyword 'nullable' is ignored (at #)"),
        (
            {"$schema": DRAFT_4, "items": {"const": 1}},
            "'const' does not belong to draft draft-04 and is ignored (at #/items)",
        ),
        ({"$schema": DRAFT_2020, "dependencies": {}}, "'dependencies' does not belong to draft 2020-12"),
        ({"$schema": DRAFT_2020, "format": "date"}, "'format' asserts nothing in draft 2020-12"),
    ],
)
def test_what_has_no_effect_is_said(schema: Any, warning: str) -> None:
    assert [found for found in prepare(json.dumps(schema)).warnings if warning in found]


def test_unknown_drafts_are_refused() -> None:
    error = refusal({"$schema": "http://json-schema.org/draft-03/schema#"})
    assert (error.code, error.where) == ("unsupported", "#/$schema")


class TestNotStrict:
    def test_what_is_only_validated_is_listed(self) -> None:
        schema = inside({"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 9})
        prepared = prepare(json.dumps(schema), strict=False)
        assert prepared.validated_only == ["uniqueItems at #/properties/xs"]
        assert prepared.validate('{"xs": [1, 2]}') is None
        assert "non-unique" in (prepared.validate('{"xs": [1, 1]}') or "")

    def test_alternatives_that_may_overlap_stay_alternatives(self) -> None:
        schema = {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}], "type": "integer"}
        prepared = prepare(json.dumps(schema), strict=False)
        assert prepared.validated_only == ["oneOf at #"]
        assert prepared.validate("4") is None
        assert prepared.validate("6")
        assert "anyOf" in json.dumps(prepared.schema)

    def test_what_is_not_even_checked_is_a_warning(self) -> None:
        prepared = prepare(json.dumps(inside({"type": "string", "format": "topic"})), strict=False)
        assert prepared.validated_only == []
        assert ["topic" in warning and "nor is it checked" in warning for warning in prepared.warnings] == [
            True
        ]

    def test_weakening_never_forbids_more(self) -> None:
        for schema in (
            {"not": {"format": "topic"}, "type": "string"},
            {"if": {"format": "topic"}, "then": False},
            {"patternProperties": {r"\bx": {}}, "additionalProperties": False},
        ):
            prepared = prepare(json.dumps(schema), strict=False)
            for text in ('"a"', '{"x y": 1}'):
                if schema.get("type") != "string" or text.startswith('"'):
                    assert prepared.validate(text) is None, (schema, text)


def test_validation_says_what_and_where() -> None:
    prepared = prepare(json.dumps(inside({"type": "array", "items": {"type": "integer"}})))
    problem = prepared.validate('{"xs": [1, "a"]}') or ""
    assert "'type'" in problem
    assert "#/xs/1" in problem
    assert "not valid JSON" in (prepared.validate("{") or "")
    assert prepared.validate("[" * 100_000 + "]" * 100_000)


def test_multiples_are_exact() -> None:
    prepared = prepare('{"type": "number", "multipleOf": 0.01}')
    assert prepared.validate("4.02") is None
    assert prepared.validate("4.021")
