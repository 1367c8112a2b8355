"""A lowered schema has exactly the instances of the schema it was made from: the oracle is ``jsonschema``."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trellis.errors import ConstraintError
from trellis.fsm.json_schema import Prepared, prepare

RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=40)
LATEST = jsonschema.Draft202012Validator
REWRITTEN = [
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "maxProperties",
    "minProperties",
    "not",
    "oneOf",
    "patternProperties",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
]
ENFORCED = frozenset(
    [
        "type",
        "enum",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "anyOf",
        "allOf",
        "$ref",
        "$defs",
    ]
)


def keywords(schema: Any) -> set[str]:
    """Every keyword of a lowered schema, with those inside."""
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for keyword, value in schema.items():
        inside = value if isinstance(value, list) else [value]
        if keyword in ("properties", "patternProperties", "$defs"):
            inside = list(value.values())
        if keyword not in ("enum", "required", "type"):
            found |= {name for inner in inside for name in keywords(inner)}
    return found


def holds(schema: Any, value: Any, library: Any = LATEST) -> bool:
    return bool(library(schema).is_valid(value))


def prepared_or_refused(schema: Any, strict: bool = True) -> Prepared | ConstraintError:
    try:
        return prepare(json.dumps(schema), strict)
    except ConstraintError as refusal:
        return refusal


def check(schema: Any, values: list[Any], library: Any = LATEST) -> None:
    """The same answer from the library, from the lowered schema and from the final check."""
    prepared = prepared_or_refused(schema)
    if isinstance(prepared, ConstraintError):
        assert prepared.code in ("unsupported", "empty", "syntax", "limit"), prepared
        if prepared.code == "empty":
            assert not any(holds(schema, value, library) for value in values)
        if prepared.code == "syntax":
            assert "leads back to itself" in prepared.detail
        return
    assert keywords(prepared.schema) <= ENFORCED
    assert prepared.validated_only == []
    for value in values:
        expected = holds(schema, value, library)
        assert holds(prepared.schema, value) == expected, (value, prepared.schema)
        assert (prepared.validate(json.dumps(value)) is None) == expected, value


@pytest.mark.parametrize("keyword", REWRITTEN)
def test_each_rewrite_keeps_the_instances(keyword: str, world: Any) -> None:
    @RELAXED
    @given(world.schemas_with(keyword), st.lists(world.values, min_size=5, max_size=5))
    def run(schema: Any, values: list[Any]) -> None:
        check(schema, values)

    run()


def test_rewrites_inside_each_other_keep_the_instances(world: Any) -> None:
    @settings(RELAXED, max_examples=150)
    @given(world.schemas(), st.lists(world.values, min_size=5, max_size=5))
    def run(schema: Any, values: list[Any]) -> None:
        check(schema, values)

    run()


def test_references_keep_the_instances(world: Any) -> None:
    @settings(RELAXED, max_examples=80)
    @given(world.schemas_with_references(), st.lists(world.values, min_size=4, max_size=4))
    def run(schema: Any, values: list[Any]) -> None:
        check(schema, values)

    run()


@pytest.mark.parametrize(
    ("draft", "library"),
    [(4, jsonschema.Draft4Validator), (6, jsonschema.Draft6Validator), (7, jsonschema.Draft7Validator)],
)
def test_old_drafts_mean_what_they_meant(draft: int, library: Any, world: Any) -> None:
    @settings(RELAXED, max_examples=50)
    @given(world.old_schemas(draft), st.lists(world.values, min_size=4, max_size=4))
    def run(schema: Any, values: list[Any]) -> None:
        check(schema, values, library)

    run()


def test_without_strict_only_more_is_accepted_and_the_final_check_is_exact(world: Any) -> None:
    @settings(RELAXED, max_examples=80)
    @given(world.schemas(), st.lists(world.values, min_size=5, max_size=5))
    def run(schema: Any, values: list[Any]) -> None:
        prepared = prepared_or_refused(schema, strict=False)
        if isinstance(prepared, ConstraintError):
            assert prepared.code in ("empty", "limit"), prepared
            return
        for value in values:
            expected = holds(schema, value)
            enforced = holds(prepared.schema, value)
            assert enforced or not expected
            assert enforced == expected or prepared.validated_only
            assert (prepared.validate(json.dumps(value)) is None) == expected

    run()
