"""JSON values as JSON schema compares them: 1 is 1.0, but true is not 1.

A number is an int, a float, or a Decimal where no float says exactly what was written.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

# ``number`` is taken apart so that sets of types can be complemented.
INTEGER, FRACTION = "integer", "fraction"
EVERY_TYPE = frozenset({"null", "boolean", INTEGER, FRACTION, "string", "array", "object"})
NUMBERS = frozenset({INTEGER, FRACTION})
_NAMES = {"number": NUMBERS}


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return INTEGER
    if isinstance(value, Decimal):
        return INTEGER if value == value.to_integral_value() else FRACTION
    if isinstance(value, float):
        return FRACTION
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def types_named(names: str | list[str]) -> frozenset[str]:
    """``number`` stands for both of its parts."""
    parts = [names] if isinstance(names, str) else names
    return frozenset().union(*(_NAMES.get(name, {name}) for name in parts))


def names_of(types: frozenset[str]) -> list[str]:
    """The inverse of ``types_named``; ``fraction`` stays where ``integer`` is not with it."""
    if types >= NUMBERS:
        types = (types - NUMBERS) | {"number"}
    return sorted(types)


def same(one: Any, other: Any) -> bool:
    kind = type_of(one)
    if kind != type_of(other):
        return False
    if kind == "array":
        return len(one) == len(other) and all(map(same, one, other))
    if kind == "object":
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def freeze(value: Any) -> Any:
    """A hashable stand-in: equal exactly for values that are ``same``."""
    kind = type_of(value)
    if kind == "array":
        return kind, tuple(map(freeze, value))
    if kind == "object":
        return kind, frozenset((key, freeze(item)) for key, item in value.items())
    return kind, value
