"""Validating a value against a schema in the form of ``normalise``, with the ``jsonschema`` library.

The library's own ways with patterns (backtracking) and with ``multipleOf`` (floating point) are replaced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import jsonschema
from referencing import Registry

from trellis.fsm.json_schema.matching import matches
from trellis.fsm.json_schema.pointer import child
from trellis.fsm.json_schema.values import FRACTION, type_of

Errors = Iterator[Any]


class Validator:
    """Judges values by schemas that refer to the definitions; looks nothing up elsewhere."""

    def __init__(self, definitions: dict[str, Any]) -> None:
        self._library = _Library({"$defs": definitions}, registry=Registry())

    def is_valid(self, value: Any, schema: Any) -> bool:
        return bool(self._library.evolve(schema=schema).is_valid(value))

    def errors(self, value: Any, schema: Any) -> Errors:
        return self._library.evolve(schema=schema).iter_errors(value)  # type: ignore[no-any-return]


def text_check(schema: Any, definitions: dict[str, Any]) -> Callable[[str], str | None]:
    """A function that says what is wrong with a JSON text, or None."""
    validator = Validator(definitions)

    def check(text: str) -> str | None:
        try:
            value = json.loads(text)
            error = jsonschema.exceptions.best_match(validator.errors(value, schema))
        except RecursionError:
            return "nested too deeply to be validated"
        except ValueError as problem:
            return f"not valid JSON: {problem}"
        if error is None:
            return None
        at = "#"
        for key in error.absolute_path:
            at = child(at, key)
        return f"{_short(error.message)} (keyword {error.validator!r}, at {at} of the text)"

    return check


def _short(message: str) -> str:
    return message if len(message) <= 200 else f"{message[:150]} ... {message[-40:]}"


def _is_fraction(_checker: Any, value: Any) -> bool:
    return isinstance(value, float) and type_of(value) == FRACTION


def _pattern(_validator: Any, pattern: str, value: Any, _schema: Any) -> Errors:
    if isinstance(value, str) and not matches(pattern, value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _multiple_of(_validator: Any, divisor: Any, value: Any, _schema: Any) -> Errors:
    if isinstance(value, int | float) and not isinstance(value, bool):
        quotient = Fraction(repr(value)) / Fraction(repr(divisor))
        if quotient.denominator != 1:
            yield jsonschema.ValidationError(f"{value!r} is not a multiple of {divisor!r}")


def _pattern_properties(validator: Any, patterns: dict[str, Any], value: Any, _schema: Any) -> Errors:
    if isinstance(value, dict):
        for pattern, schema in patterns.items():
            for name, inner in value.items():
                if matches(pattern, name):
                    yield from validator.descend(inner, schema, path=name, schema_path=pattern)


def _additional_properties(validator: Any, rest: Any, value: Any, schema: Any) -> Errors:
    if isinstance(value, dict):
        for name, inner in value.items():
            if not _listed(name, schema):
                if rest is False:
                    yield jsonschema.ValidationError(f"the property {name!r} is not allowed")
                else:
                    yield from validator.descend(inner, rest, path=name)


def _listed(name: str, schema: dict[str, Any]) -> bool:
    return name in schema.get("properties", {}) or any(
        matches(pattern, name) for pattern in schema.get("patternProperties", {})
    )


def _unevaluated_properties(validator: Any, rest: Any, value: Any, schema: Any) -> Errors:
    if isinstance(value, dict):
        own = {keyword: inner for keyword, inner in schema.items() if keyword != "unevaluatedProperties"}
        evaluated = _evaluated(validator, value, own)
        for name, inner in value.items():
            if name not in evaluated and not validator.evolve(schema=rest).is_valid(inner):
                yield jsonschema.ValidationError(
                    f"the property {name!r} is not allowed by unevaluatedProperties"
                )


def _evaluated(validator: Any, value: dict[str, Any], schema: Any) -> set[str]:
    """Names that a schema, which holds for the value, has looked at."""
    if not isinstance(schema, dict):
        return set()
    if "additionalProperties" in schema or "unevaluatedProperties" in schema:
        return set(value)
    found = {name for name in value if _listed(name, schema)}
    for inner in _in_place(validator, value, schema):
        found |= _evaluated(validator, value, inner)
    return found


def _in_place(validator: Any, value: dict[str, Any], schema: dict[str, Any]) -> Iterator[Any]:
    """Schemas inside that are for the same value and hold for it."""

    def holds(inner: Any) -> bool:
        return bool(validator.evolve(schema=inner).is_valid(value))

    if "$ref" in schema:
        yield validator._resolver.lookup(schema["$ref"]).contents
    for keyword in ("allOf", "anyOf", "oneOf"):
        yield from filter(holds, schema.get(keyword, ()))
    for name, inner in schema.get("dependentSchemas", {}).items():
        if name in value:
            yield inner
    if "if" in schema:
        if holds(schema["if"]):
            yield schema["if"]
            yield schema.get("then", True)
        else:
            yield schema.get("else", True)


_Library = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    {
        "pattern": _pattern,
        "multipleOf": _multiple_of,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "unevaluatedProperties": _unevaluated_properties,
    },
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(FRACTION, _is_fraction),
)
