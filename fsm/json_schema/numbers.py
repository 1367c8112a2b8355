"""Rewrites of constants, and of bounds that are larger than the engine's numbers.

llguidance reads every number of a schema as a double, and compares no more than 64 bits. A bound that is none is
drawn in to the nearest one that holds: nothing invalid is let through, and a warning says what cannot be written.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

from trellis.fsm.json_schema.errors import Unenforceable
from trellis.fsm.json_schema.normalise import Schema
from trellis.fsm.json_schema.scene import Scene
from trellis.fsm.json_schema.values import INTEGER, NUMBERS, type_of, types_named

_LARGEST = 2**63 - 1024  # that numbers are compared with: a double
_LARGEST_INTEGER = 2**63 - 1  # no double, but read as it stands, as the upper bound of an integer
_LARGEST_LEAST = 10**18  # a lower bound must be below this
_REMAINDERS = 100_000
_EXACT = 2**53  # up to here every integer is a double


def constants(scene: Scene) -> list[Schema]:
    """``enum``: those that what else is known allows."""
    others = [part for part in scene.facts.parts if part.keys() - {"enum", "$at"}]
    allowed = [
        value for value in scene.schema["enum"] if all(scene.relations.valid(value, part) for part in others)
    ]
    if not _spelled_alike(allowed):
        raise Unenforceable("enum", scene.at, f"it holds an integer past {_EXACT} that is no double")
    scene.schema["enum"] = allowed
    return []


def _spelled_alike(value: Any) -> bool:
    """Does llguidance, which reads doubles, spell exactly this value?"""
    if isinstance(value, list):
        return all(map(_spelled_alike, value))
    if isinstance(value, dict):
        return all(map(_spelled_alike, value.values()))
    if type_of(value) not in NUMBERS or abs(value) <= _EXACT:
        return True
    try:
        return Decimal(repr(float(value))) == Decimal(value)
    except OverflowError:
        return False


def bound(scene: Scene) -> list[Schema]:
    """``minimum``, ``maximum`` and the exclusive ones."""
    schema = scene.schema
    whole = types_named(schema.get("type", "number")) == {INTEGER}
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        value = schema.get(keyword)
        if value is None or abs(value) < _EXACT:
            continue
        lower = "inimum" in keyword
        drawn = _drawn_in(value if lower else -value, keyword.startswith("exclusive"), whole)
        if drawn is None:
            raise Unenforceable(keyword, scene.at, f"a number past {_LARGEST_LEAST} leaves too few")
        drawn = drawn if lower else -drawn
        if whole and not lower and value >= _LARGEST_INTEGER + keyword.startswith("exclusive"):
            drawn = _LARGEST_INTEGER
        plain = "minimum" if lower else "maximum"
        del schema[keyword]
        if plain in schema:
            drawn = (max if lower else min)(schema[plain], drawn)
        schema[plain] = drawn
        if drawn != value:
            scene.warn(f"{keyword} {value} at {scene.at} is enforced as {plain} {drawn}")
    return []


def multiple(scene: Scene) -> list[Schema]:
    """``multipleOf``: the engine has a state for each remainder."""
    divisors = [Fraction(repr(divisor)) for divisor in scene.facts.having("multipleOf")]
    common = Fraction(
        math.lcm(*(divisor.numerator for divisor in divisors)),
        math.gcd(*(divisor.denominator for divisor in divisors)),
    )
    while common.denominator > 1:
        common *= 10
    if common > _REMAINDERS:
        raise Unenforceable("multipleOf", scene.at, f"it leaves more than {_REMAINDERS} remainders")
    return []


def _drawn_in(least: float, exclusive: bool, whole: bool) -> int | None:
    """The smallest number, not below this bound, that can be a bound; None if there is none."""
    if least >= _LARGEST_LEAST:
        return None
    double = float(max(least, -_LARGEST))
    while double < least or (exclusive and double == least) or not (whole or _spelled_alike(int(double))):
        double = math.nextafter(double, math.inf)
    return int(double)
