"""When what one keyword says follows from what is known: a rule a keyword. See ``relations``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trellis.fsm.json_schema.facts import Facts, property_schemas
from trellis.fsm.json_schema.normalise import Schema
from trellis.fsm.json_schema.values import NUMBERS, types_named

if TYPE_CHECKING:
    from trellis.fsm.json_schema.relations import Relations

_STRING, _ARRAY, _OBJECT = frozenset({"string"}), frozenset({"array"}), frozenset({"object"})
# Types that a keyword says anything about.
ABOUT: dict[str, frozenset[str]] = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), NUMBERS),
    **dict.fromkeys(("minLength", "maxLength", "pattern"), _STRING),
    **dict.fromkeys(
        ("items", "prefixItems", "contains", "minContains", "maxContains", "minItems", "maxItems", "uniqueItems"), _ARRAY
    ),
    "unevaluatedItems": _ARRAY,
    **dict.fromkeys(
        ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
         "dependentRequired", "dependentSchemas", "propertyNames", "unevaluatedProperties"), _OBJECT
    ),
}  # fmt: skip
_COMPANIONS = {
    "additionalProperties": ("properties", "patternProperties"),
    "items": ("prefixItems",),
    "contains": ("minContains", "maxContains"),
    "minContains": ("contains",),
    "maxContains": ("contains",),
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
}


def same_companions(part: dict[str, Any], schema: dict[str, Any], keyword: str) -> bool:
    if keyword.startswith("unevaluated"):
        return part is schema
    return all(part.get(other) == schema.get(other) for other in _COMPANIONS.get(keyword, ()))


Rule = Callable[["Relations", Facts, Any, "dict[str, Any]"], bool]


def _type(_r: Relations, facts: Facts, value: Any, _s: dict[str, Any]) -> bool:
    return facts.types <= types_named(value)


def _minimum(_r: Relations, facts: Facts, value: float, _s: dict[str, Any]) -> bool:
    return facts.most("minimum", -math.inf) >= value or facts.most("exclusiveMinimum", -math.inf) >= value


def _above(_r: Relations, facts: Facts, value: float, _s: dict[str, Any]) -> bool:
    return facts.most("minimum", -math.inf) > value or facts.most("exclusiveMinimum", -math.inf) >= value


def _maximum(_r: Relations, facts: Facts, value: float, _s: dict[str, Any]) -> bool:
    return facts.least("maximum") <= value or facts.least("exclusiveMaximum") <= value


def _below(_r: Relations, facts: Facts, value: float, _s: dict[str, Any]) -> bool:
    return facts.least("maximum") < value or facts.least("exclusiveMaximum") <= value


def _at_least(keyword: str) -> Rule:
    def rule(_r: Relations, facts: Facts, value: int, _s: dict[str, Any]) -> bool:
        least = facts.most(keyword)
        if keyword == "minProperties":
            least = max(least, len(facts.required))
        return least >= value

    return rule


def _at_most(keyword: str) -> Rule:
    def rule(_r: Relations, facts: Facts, value: int, _s: dict[str, Any]) -> bool:
        most = facts.most_items if keyword == "maxItems" else facts.least(keyword)
        if keyword == "maxProperties" and facts.closed:
            most = min(most, sum(not facts.forbids(name) for name in facts.named))
        return most <= value

    return rule


def _pattern(r: Relations, facts: Facts, value: str, _s: dict[str, Any]) -> bool:
    known = list(dict.fromkeys(facts.having("pattern")))
    return bool(known) and r.algebra.included(known, value)


def _required(_r: Relations, facts: Facts, value: list[str], _s: dict[str, Any]) -> bool:
    return facts.required.keys() >= set(value)


def _properties(r: Relations, facts: Facts, value: dict[str, Schema], _s: dict[str, Any]) -> bool:
    return all(r.follows(r.facts(facts.member(name)), schema) for name, schema in value.items())


def _pattern_properties(r: Relations, facts: Facts, value: dict[str, Schema], _s: dict[str, Any]) -> bool:
    if all(inner is True for inner in value.values()):
        return True
    return facts.closed and all(
        r.follows(r.facts(facts.member(name)), inner)
        for name in facts.named
        for inner in property_schemas({"patternProperties": value}, name)
    )


def _additional_properties(r: Relations, facts: Facts, value: Schema, schema: dict[str, Any]) -> bool:
    if value is True:
        return True
    if not facts.closed:
        return False
    listed: dict[str, Any] = {
        key: schema[key] for key in ("properties", "patternProperties") if key in schema
    }
    return all(
        bool(property_schemas(listed, name)) or r.follows(r.facts(facts.member(name)), value)
        for name in facts.named
    )


def _prefix_items(r: Relations, facts: Facts, value: list[Schema], _s: dict[str, Any]) -> bool:
    return all(
        i >= facts.most_items or r.follows(r.facts(facts.item(i)), schema) for i, schema in enumerate(value)
    )


def _items(r: Relations, facts: Facts, value: Schema, schema: dict[str, Any]) -> bool:
    start, stop = (
        len(schema.get("prefixItems", ())),
        max(facts.prefix, len(schema.get("prefixItems", ()))) + 1,
    )
    return all(i >= facts.most_items or r.follows(r.facts(facts.item(i)), value) for i in range(start, stop))


def _unique_items(_r: Relations, facts: Facts, value: bool, _s: dict[str, Any]) -> bool:
    return not value or facts.most_items <= 1


def _property_names(r: Relations, facts: Facts, value: Schema, _s: dict[str, Any]) -> bool:
    if value is True:
        return True
    return facts.closed and all(facts.forbids(name) or r.valid(name, value) for name in facts.named)


def _contains(r: Relations, facts: Facts, value: Schema, schema: dict[str, Any]) -> bool:
    least, most = schema.get("minContains", 1), schema.get("maxContains", math.inf)
    if most < facts.most_items:
        return False
    if least == 0:
        return True
    stop = facts.prefix + 1
    return facts.most("minItems") >= least and all(
        r.follows(r.facts(facts.item(i)), value) for i in range(stop)
    )


def _dependent_required(_r: Relations, facts: Facts, value: dict[str, list[str]], _s: dict[str, Any]) -> bool:
    return all(facts.forbids(name) or facts.required.keys() >= set(needs) for name, needs in value.items())


def _dependent_schemas(r: Relations, facts: Facts, value: dict[str, Schema], _s: dict[str, Any]) -> bool:
    return all(facts.forbids(name) or r.follows(facts, schema) for name, schema in value.items())


def _reference(r: Relations, facts: Facts, value: str, _s: dict[str, Any]) -> bool:
    return r.follows(facts, r.definitions[value.rpartition("/")[2]])


def _all_of(r: Relations, facts: Facts, value: list[Schema], _s: dict[str, Any]) -> bool:
    return all(r.follows(facts, schema) for schema in value)


def _any_of(r: Relations, facts: Facts, value: list[Schema], _s: dict[str, Any]) -> bool:
    return any(r.follows(facts, schema) for schema in value)


def _one_of(r: Relations, facts: Facts, value: list[Schema], _s: dict[str, Any]) -> bool:
    holding = [i for i, schema in enumerate(value) if r.follows(facts, schema)]
    return len(holding) == 1 and all(
        r.no_value(r.facts([*facts.parts, schema])) for i, schema in enumerate(value) if i != holding[0]
    )


def _not(r: Relations, facts: Facts, value: Schema, _s: dict[str, Any]) -> bool:
    return r.no_value(r.facts([*facts.parts, value]))


def _if(r: Relations, facts: Facts, value: Schema, schema: dict[str, Any]) -> bool:
    yes, no = schema.get("then", True), schema.get("else", True)
    return (
        (r.follows(facts, yes) and r.follows(facts, no))
        or (r.follows(facts, yes) and r.follows(facts, value))
        or (r.follows(facts, no) and _not(r, facts, value, schema))
    )


def _beside_if(_r: Relations, _facts: Facts, _value: Schema, _s: dict[str, Any]) -> bool:
    return True  # judged with ``if``; alone it says nothing


def _beside_contains(r: Relations, facts: Facts, _value: int, schema: dict[str, Any]) -> bool:
    return "contains" not in schema or _contains(r, facts, schema["contains"], schema)


RULES: dict[str, Rule] = {
    "type": _type,
    "minimum": _minimum,
    "exclusiveMinimum": _above,
    "maximum": _maximum,
    "exclusiveMaximum": _below,
    "minLength": _at_least("minLength"),
    "maxLength": _at_most("maxLength"),
    "minItems": _at_least("minItems"),
    "maxItems": _at_most("maxItems"),
    "minProperties": _at_least("minProperties"),
    "maxProperties": _at_most("maxProperties"),
    "pattern": _pattern,
    "required": _required,
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "prefixItems": _prefix_items,
    "items": _items,
    "uniqueItems": _unique_items,
    "propertyNames": _property_names,
    "contains": _contains,
    "minContains": _beside_contains,
    "maxContains": _beside_contains,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "$ref": _reference,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "then": _beside_if,
    "else": _beside_if,
}
