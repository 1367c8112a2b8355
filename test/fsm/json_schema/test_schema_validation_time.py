"""The check of a finished text takes linear time, whatever the patterns of its schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trellis.fsm.json_schema import prepare

# ``re`` needs 2**60 steps to find these out.
EVIL = "^((a|a)*b|a*)$"
MANY = "a" * 60


def wrong(schema: Any, value: Any) -> str | None:
    return prepare(json.dumps(schema), strict=False).validate(json.dumps(value))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"pattern": EVIL}, MANY, MANY + "c"),
        ({"patternProperties": {EVIL: {"type": "null"}}}, {MANY: None}, {MANY: 1}),
        ({"patternProperties": {EVIL: {}}, "additionalProperties": False}, {MANY: 1}, {MANY + "c": 1}),
        ({"patternProperties": {EVIL: {}}, "unevaluatedProperties": False}, {MANY: 1}, {MANY + "c": 1}),
        ({"patternProperties": {EVIL: {"maximum": 5}, "^a": {"minimum": 3}}}, {MANY: 4}, {MANY: 2}),
        ({"propertyNames": {"pattern": EVIL}}, {MANY: 1}, {MANY + "c": 1}),
        ({"items": {"patternProperties": {EVIL: {"type": "null"}}}}, [{MANY: None}], [{MANY: 1}]),
        (
            {"properties": {"patternProperties": {"type": "null"}}},
            {"patternProperties": None},
            {"patternProperties": 1},
        ),
        ({"enum": [{MANY: 1}, MANY], "pattern": EVIL}, MANY, {}),
    ],
)
def test_patterns_that_backtrack_for_ever(schema: Any, good: Any, bad: Any) -> None:
    assert wrong(schema, good) is None
    assert wrong(schema, bad)
