"""Does a value satisfy a schema in the form of ``normalise``? In polynomial time, whatever the schema.

Schemas come from clients and texts from models, so nothing here may take a time or a depth that they choose: a
question remembers what it found out about every pair of schema and value (references that fan out are followed
once), patterns are matched in linear time, and a question ends after so many steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from trellis.errors import ConstraintError
from trellis.fsm.json_schema.evaluated import evaluated_items, evaluated_names, is_listed
from trellis.fsm.json_schema.matching import matches
from trellis.fsm.json_schema.normalise import AT, DEFS, Schema
from trellis.fsm.json_schema.pointer import child
from trellis.fsm.json_schema.values import NUMBERS, freeze, same, type_of, types_named

_STEPS = 500_000  # pairs of a schema and a value in one question: about a second

_FAR = 10**17  # as exponent of a number that has a larger one
_FIGURES = 4_000  # of an integer that Python reads as such

_SEARCHED = 16  # members of an ``enum`` that are looked at one by one


@dataclass(frozen=True)
class Problem:
    """What is wrong: the keyword that is broken, and the path to the value that breaks it."""

    keyword: str
    message: str
    path: tuple[str | int, ...] = ()

    def under(self, key: str | int) -> Problem:
        return replace(self, path=(key, *self.path))


class Validator:
    """Judges values by schemas that refer to the definitions."""

    def __init__(self, definitions: dict[str, Schema]) -> None:
        self.definitions = definitions
        self._sets: dict[int, tuple[list[Any], frozenset[Any]]] = {}

    def is_one_of(self, value: Any, values: list[Any]) -> bool:
        """Long lists are looked up in sets, which are kept along with the lists."""
        if len(values) <= _SEARCHED:
            return any(value == one and same(value, one) for one in values)
        if id(values) not in self._sets:
            self._sets[id(values)] = values, frozenset(map(freeze, values))
        return freeze(value) in self._sets[id(values)][1]

    def is_valid(self, value: Any, schema: Schema) -> bool:
        return self.problem(value, schema) is None

    def problem(self, value: Any, schema: Schema) -> Problem | None:
        """Raises ConstraintError ``limit`` when that takes too many steps."""
        return Question(self).ask(value, schema)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _number(text: str) -> float | Decimal:
    """A float where that is the very number; masks compare figures, and so does the check."""
    number = float(text)
    try:
        exact = Decimal(text)
    except InvalidOperation:  # no Decimal has such an exponent; all those numbers compare alike
        figures, _, exponent = text.lower().partition("e")
        exact = Decimal(f"{figures}e{'-' * exponent.startswith('-')}{_FAR}")
    return number if math.isfinite(number) and Decimal(repr(number)) == exact else exact


def _integer(text: str) -> int | Decimal:
    return int(text) if len(text) <= _FIGURES else Decimal(text)


def text_check(schema: Schema, definitions: dict[str, Schema]) -> Callable[[str], str | None]:
    """A function that says what is wrong with a JSON text, or None."""
    validator = Validator(definitions)

    def check(text: str) -> str | None:
        try:
            value = json.loads(text, parse_int=_integer, parse_float=_number, parse_constant=_no_constant)
            problem = validator.problem(value, schema)
        except RecursionError:
            return "nested too deeply to be validated"
        except ConstraintError as error:
            return error.detail
        except ValueError as error:
            return f"not valid JSON: {error}"
        if problem is None:
            return None
        at = "#"
        for key in problem.path:
            at = child(at, key)
        return f"{_short(problem.message)} (keyword {problem.keyword!r}, at {at} of the text)"

    return check


def _short(message: str) -> str:
    return message if len(message) <= 200 else f"{message[:150]} ... {message[-40:]}"


class Question:
    """One value, judged by one schema. The answers for what is inside are kept by identity: both are alive."""

    def __init__(self, validator: Validator) -> None:
        self.validator = validator
        self._known: dict[tuple[int, int], Problem | None] = {}
        self._steps = 0

    def definition(self, reference: str) -> Schema:
        return self.validator.definitions[reference.removeprefix(DEFS)]

    def holds(self, value: Any, schema: Schema) -> bool:
        return self.ask(value, schema) is None

    def ask(self, value: Any, schema: Schema) -> Problem | None:
        if schema is True:
            return None
        if schema is False:
            return Problem("false", f"{value!r:.80} is not allowed")
        key = id(schema), id(value)
        if key not in self._known:
            self._steps += 1
            if self._steps > _STEPS:
                reason = f"the schema takes more than {_STEPS} steps to validate this value"
                raise ConstraintError("schema", "limit", str(schema.get(AT, "")), reason)
            self._known[key] = self._judge(value, schema)
        return self._known[key]

    def _judge(self, value: Any, schema: dict[str, Any]) -> Problem | None:
        kind = type_of(value)
        for keyword, wanted in schema.items():
            about, rule = _RULES.get(keyword, (None, None))
            if rule is None or (
                about is not None and about != kind and not (about == "number" and kind in NUMBERS)
            ):
                continue
            problem = rule(self, wanted, value, schema)
            if problem is not None:
                return problem if isinstance(problem, Problem) else Problem(keyword, problem)
        return None


Verdict = Problem | str | None  # a str: what is wrong with this very value
Rule = Callable[[Question, Any, Any, "dict[str, Any]"], Verdict]


def _type(_q: Question, wanted: Any, value: Any, _s: dict[str, Any]) -> Verdict:
    return None if type_of(value) in types_named(wanted) else f"{value!r:.80} is not of type {wanted!r}"


def _enum(q: Question, wanted: list[Any], value: Any, _s: dict[str, Any]) -> Verdict:
    return None if q.validator.is_one_of(value, wanted) else f"{value!r:.80} is not one of {wanted!r:.120}"


def _bound(holds: Callable[[Any, Any], bool], words: str, size: Callable[[Any], Any] = lambda v: v) -> Rule:
    def rule(_q: Question, wanted: Any, value: Any, _s: dict[str, Any]) -> Verdict:
        bound = Decimal(repr(wanted)) if isinstance(value, Decimal) else wanted
        return None if holds(size(value), bound) else f"{value!r:.80} {words} {wanted!r:.40}"

    return rule


def _multiple_of(_q: Question, wanted: Any, value: Any, _s: dict[str, Any]) -> Verdict:
    return (
        None if _divides(Fraction(repr(wanted)), value) else f"{value!r:.80} is not a multiple of {wanted!r}"
    )


def _divides(divisor: Fraction, value: float | Decimal) -> bool:
    """In whole numbers, none of which is as long as the value's exponent says."""
    _, figures, exponent = Decimal(str(value)).as_tuple()
    number = int(Decimal((0, figures, 0))) * divisor.denominator
    if not isinstance(exponent, int) or not number:
        return not number
    if exponent >= 0:
        return not number * pow(10, exponent, divisor.numerator) % divisor.numerator
    if -exponent > number.bit_length():
        return False
    return not number % (divisor.numerator * 10**-exponent)


def _pattern(_q: Question, wanted: str, value: str, _s: dict[str, Any]) -> Verdict:
    return None if matches(wanted, value) else f"{value!r:.80} does not match {wanted!r:.100}"


def _members(members: Iterator[tuple[str | int, Any, Schema]], question: Question) -> Verdict:
    """The first problem among values inside."""
    for key, inner, schema in members:
        problem = question.ask(inner, schema)
        if problem is not None:
            return problem.under(key)
    return None


def _properties(q: Question, wanted: dict[str, Schema], value: dict[str, Any], _s: dict[str, Any]) -> Verdict:
    return _members(((name, value[name], inner) for name, inner in wanted.items() if name in value), q)


def _pattern_properties(
    q: Question, wanted: dict[str, Schema], value: dict[str, Any], _s: dict[str, Any]
) -> Verdict:
    found = (
        (name, value[name], inner)
        for pattern, inner in wanted.items()
        for name in value
        if matches(pattern, name)
    )
    return _members(found, q)


def _others(found: list[str], wanted: Schema, value: dict[str, Any], question: Question) -> Verdict:
    if wanted is False and found:
        return f"the property {found[0]!r} is not allowed"
    return _members(((name, value[name], wanted) for name in found), question)


def _additional(q: Question, wanted: Schema, value: dict[str, Any], schema: dict[str, Any]) -> Verdict:
    return _others([name for name in value if not is_listed(name, schema)], wanted, value, q)


def _unevaluated(q: Question, wanted: Schema, value: dict[str, Any], schema: dict[str, Any]) -> Verdict:
    evaluated = evaluated_names(q, value, schema, but="unevaluatedProperties")
    return _others([name for name in value if name not in evaluated], wanted, value, q)


def _unevaluated_items(q: Question, wanted: Schema, value: list[Any], schema: dict[str, Any]) -> Verdict:
    evaluated = evaluated_items(q, value, schema, but="unevaluatedItems")
    return _members(((i, item, wanted) for i, item in enumerate(value) if i not in evaluated), q)


def _required(_q: Question, wanted: list[str], value: dict[str, Any], _s: dict[str, Any]) -> Verdict:
    return next((f"{name!r} is a required property" for name in wanted if name not in value), None)


def _property_names(q: Question, wanted: Schema, value: dict[str, Any], _s: dict[str, Any]) -> Verdict:
    return next((f"the name {name!r} is not allowed" for name in value if not q.holds(name, wanted)), None)


def _dependent_required(
    _q: Question, wanted: dict[str, list[str]], value: dict[str, Any], _s: dict[str, Any]
) -> Verdict:
    missing = (
        f"{need!r} is required beside {name!r}"
        for name, needs in wanted.items()
        if name in value
        for need in needs
        if need not in value
    )
    return next(missing, None)


def _prefix_items(q: Question, wanted: list[Schema], value: list[Any], _s: dict[str, Any]) -> Verdict:
    return _members(((i, item, inner) for i, (item, inner) in enumerate(zip(value, wanted, strict=False))), q)


def _items(q: Question, wanted: Schema, value: list[Any], schema: dict[str, Any]) -> Verdict:
    start = len(schema.get("prefixItems", ()))
    return _members(((i, value[i], wanted) for i in range(start, len(value))), q)


def _contains(q: Question, wanted: Schema, value: list[Any], schema: dict[str, Any]) -> Verdict:
    least, most = schema.get("minContains", 1), schema.get("maxContains", len(value))
    count = sum(q.holds(item, wanted) for item in value)
    if least <= count <= most:
        return None
    return f"{count} items of {value!r:.80} match, where {least} to {most} should"


def _unique_items(_q: Question, wanted: bool, value: list[Any], _s: dict[str, Any]) -> Verdict:
    unique = not wanted or len(set(map(freeze, value))) == len(value)
    return None if unique else f"{value!r:.80} has non-unique items"


def _dependent_schemas(
    q: Question, wanted: dict[str, Schema], value: dict[str, Any], _s: dict[str, Any]
) -> Verdict:
    found = (q.ask(value, inner) for name, inner in wanted.items() if name in value)
    return next((problem for problem in found if problem is not None), None)


def _reference(q: Question, wanted: str, value: Any, _s: dict[str, Any]) -> Verdict:
    return q.ask(value, q.definition(wanted))


def _all_of(q: Question, wanted: list[Schema], value: Any, _s: dict[str, Any]) -> Verdict:
    return next((problem for inner in wanted if (problem := q.ask(value, inner)) is not None), None)


def _any_of(q: Question, wanted: list[Schema], value: Any, _s: dict[str, Any]) -> Verdict:
    """The problem of the one alternative that got furthest inside, if there is one."""
    problems = []
    for inner in wanted:
        problem = q.ask(value, inner)
        if problem is None:
            return None
        problems.append(problem)
    deepest = max(problems, key=lambda problem: len(problem.path), default=None)
    return (
        deepest if deepest and deepest.path else f"{value!r:.80} fits none of the {len(wanted)} alternatives"
    )


def _one_of(q: Question, wanted: list[Schema], value: Any, _s: dict[str, Any]) -> Verdict:
    count = sum(q.holds(value, inner) for inner in wanted)
    if count == 0:
        return _any_of(q, wanted, value, _s)
    return None if count == 1 else f"{value!r:.80} fits {count} alternatives, where it must fit one"


def _not(q: Question, wanted: Schema, value: Any, _s: dict[str, Any]) -> Verdict:
    return f"{value!r:.80} is excluded" if q.holds(value, wanted) else None


def _if(q: Question, wanted: Schema, value: Any, schema: dict[str, Any]) -> Verdict:
    return q.ask(value, schema.get("then" if q.holds(value, wanted) else "else", True))


# For each keyword the type of value that it says anything about (None: of any type), and its rule.
_RULES: dict[str, tuple[str | None, Rule]] = {
    "type": (None, _type),
    "enum": (None, _enum),
    "minimum": ("number", _bound(lambda a, b: a >= b, "is less than")),
    "maximum": ("number", _bound(lambda a, b: a <= b, "is more than")),
    "exclusiveMinimum": ("number", _bound(lambda a, b: a > b, "is not more than")),
    "exclusiveMaximum": ("number", _bound(lambda a, b: a < b, "is not less than")),
    "multipleOf": ("number", _multiple_of),
    "minLength": ("string", _bound(lambda a, b: a >= b, "is shorter than", len)),
    "maxLength": ("string", _bound(lambda a, b: a <= b, "is longer than", len)),
    "pattern": ("string", _pattern),
    "minItems": ("array", _bound(lambda a, b: a >= b, "has fewer items than", len)),
    "maxItems": ("array", _bound(lambda a, b: a <= b, "has more items than", len)),
    "prefixItems": ("array", _prefix_items),
    "items": ("array", _items),
    "contains": ("array", _contains),
    "uniqueItems": ("array", _unique_items),
    "unevaluatedItems": ("array", _unevaluated_items),
    "minProperties": ("object", _bound(lambda a, b: a >= b, "has fewer properties than", len)),
    "maxProperties": ("object", _bound(lambda a, b: a <= b, "has more properties than", len)),
    "required": ("object", _required),
    "properties": ("object", _properties),
    "patternProperties": ("object", _pattern_properties),
    "additionalProperties": ("object", _additional),
    "unevaluatedProperties": ("object", _unevaluated),
    "propertyNames": ("object", _property_names),
    "dependentRequired": ("object", _dependent_required),
    "dependentSchemas": ("object", _dependent_schemas),
    "$ref": (None, _reference),
    "allOf": (None, _all_of),
    "anyOf": (None, _any_of),
    "oneOf": (None, _one_of),
    "not": (None, _not),
    "if": (None, _if),
}
