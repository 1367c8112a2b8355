"""The complement of a schema, one level deep: what is inside stays under ``not`` until it is reached."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from trellis.fsm.json_schema.errors import Unenforceable
from trellis.fsm.json_schema.facts import Facts, property_schemas
from trellis.fsm.json_schema.normalise import AT, DEFS, Schema
from trellis.fsm.json_schema.patterns import exactly
from trellis.fsm.json_schema.regular import TooHard
from trellis.fsm.json_schema.relations import Relations
from trellis.fsm.json_schema.scene import MOST_BRANCHES
from trellis.fsm.json_schema.values import EVERY_TYPE, NUMBERS, names_of, type_of, types_named


def negate(schema: Schema, given: Sequence[Schema], relations: Relations) -> Schema:
    """A schema that, together with the given ones, holds exactly where this one does not.

    What the given schemas already decide is left out, so that keywords whose complement nothing can express
    may stand in both. Raises Unenforceable.
    """
    if isinstance(schema, bool):
        return not schema
    if relations.unsatisfiable([*given, schema]):
        return True
    if relations.implied(given, schema):
        return False
    facts = relations.facts(given)
    ways: list[Schema] = []
    for keyword in schema:
        if keyword == AT or relations.keyword_implied(given, keyword, schema):
            continue
        rule = _RULES.get(keyword)
        if rule is None:
            raise Unenforceable("not", schema.get(AT, ""), f"the complement of {keyword!r} has no masks")
        ways.extend(rule(schema[keyword], _Context(schema, facts, relations)))
    ways = [way for way in ways if way is not False]
    if any(way is True for way in ways):
        return True
    if len(ways) == 1:
        return ways[0]
    return {"anyOf": ways, AT: schema.get(AT, "")} if ways else False


class _Context:
    def __init__(self, schema: dict[str, Any], facts: Facts, relations: Relations) -> None:
        self.schema = schema
        self.facts = facts
        self.relations = relations

    def typed(self, kind: str | list[str], **keywords: Any) -> dict[str, Any]:
        return {"type": kind, **keywords, AT: self.schema.get(AT, "")}

    def refuse(self, keyword: str, reason: str) -> Unenforceable:
        return Unenforceable("not", self.schema.get(AT, ""), f"the complement of {keyword!r} {reason}")


def _not(schema: Schema) -> Schema:
    return not schema if isinstance(schema, bool) else {"not": schema, AT: schema.get(AT, "")}


Ways = list[Schema]
MOST_COMPARED = 128  # alternatives of which each two are looked at


def _type(value: Any, context: _Context) -> Ways:
    others = (EVERY_TYPE - types_named(value)) & context.facts.types
    return [context.typed(names_of(others))] if others else []


def _enum(values: list[Any], context: _Context) -> Ways:
    kinds = {type_of(value) for value in values}
    untouched = context.facts.types - kinds - (NUMBERS if kinds & NUMBERS else frozenset())
    ways: Ways = [context.typed(names_of(untouched))] if untouched else []
    if kinds & NUMBERS and context.facts.types & NUMBERS:
        ways += _other_numbers([v for v in values if type_of(v) in NUMBERS], context)
    if "boolean" in kinds & context.facts.types:
        ways += [context.typed("boolean", enum=[flag]) for flag in (False, True) if not _has(values, flag)]
    if "string" in kinds & context.facts.types:
        texts = exactly([value for value in values if isinstance(value, str)])
        ways += _other_strings([texts], context, "enum")
    for kind, different in (("array", _different_array), ("object", _different_object)):
        if kind in kinds & context.facts.types:
            alternatives = [different(v, context) for v in values if type_of(v) == kind]
            ways.append(
                {
                    "allOf": [{"anyOf": found} for found in alternatives],
                    "type": kind,
                    AT: context.schema.get(AT, ""),
                }
            )
    return ways


def _has(values: list[Any], flag: bool) -> bool:
    return any(value is flag for value in values)


def _other_numbers(numbers: list[float], context: _Context) -> Ways:
    """The gaps between them."""
    ways: Ways = []
    bounds = [-math.inf, *sorted(numbers), math.inf]
    for low, high in itertools.pairwise(bounds):
        gap: dict[str, Any] = {}
        if low > -math.inf:
            gap["exclusiveMinimum"] = low
        if high < math.inf:
            gap["exclusiveMaximum"] = high
        ways.append(context.typed("number", **gap))
    return ways


def _other_strings(patterns: list[str], context: _Context, keyword: str) -> Ways:
    try:
        pattern = context.relations.algebra.difference((), patterns)
    except TooHard as error:
        raise context.refuse(keyword, f"is too large a pattern ({error})") from None
    return [] if pattern is None else [context.typed("string", pattern=pattern)]


def _different_array(value: list[Any], context: _Context) -> Ways:
    size = len(value)
    if size > MOST_BRANCHES:
        raise context.refuse("enum", f"needs arrays of at most {MOST_BRANCHES} items")
    ways: Ways = [context.typed("array", minItems=size + 1)]
    if size:
        ways.append(context.typed("array", maxItems=size - 1))
    for i, item in enumerate(value):
        prefix = [True] * i + [_not({"enum": [item], AT: context.schema.get(AT, "")})]
        ways.append(context.typed("array", minItems=i + 1, prefixItems=prefix))
    return ways


def _different_object(value: dict[str, Any], context: _Context) -> Ways:
    ways: Ways = [context.typed("object", minProperties=len(value) + 1)]
    for name, item in value.items():
        ways.append(context.typed("object", properties={name: False}))
        differs = _not({"enum": [item], AT: context.schema.get(AT, "")})
        ways.append(context.typed("object", required=[name], properties={name: differs}))
    return ways


def _turned(kind: str, opposite: str, step: int = 0) -> Callable[[Any, _Context], Ways]:
    """A bound becomes the opposite one."""

    def rule(value: Any, context: _Context) -> Ways:
        bound = value + step
        if step and bound < 0:
            return []
        return [context.typed(kind, **{opposite: bound})]

    return rule


def _pattern(value: str, context: _Context) -> Ways:
    return _other_strings([value], context, "pattern")


def _items(value: Schema, context: _Context) -> Ways:
    start = len(context.schema.get("prefixItems", ()))
    if value is False:
        return [context.typed("array", minItems=start + 1)]
    if start == 0:
        return [context.typed("array", contains=_not(value))]
    most = context.facts.most_items
    if most > MOST_BRANCHES:
        raise context.refuse("items", "after prefixItems needs a small bound on the number of items")
    found = [[True] * i + [_not(value)] for i in range(start, int(most))]
    return [context.typed("array", minItems=len(prefix), prefixItems=prefix) for prefix in found]


def _prefix_items(value: list[Schema], context: _Context) -> Ways:
    if len(value) > MOST_BRANCHES:
        raise context.refuse("prefixItems", f"needs at most {MOST_BRANCHES} of them")
    prefixes = [[True] * i + [_not(schema)] for i, schema in enumerate(value) if schema is not True]
    return [context.typed("array", minItems=len(prefix), prefixItems=prefix) for prefix in prefixes]


def _contains(value: Schema, context: _Context) -> Ways:
    least, most = context.schema.get("minContains", 1), context.schema.get("maxContains")
    ways: Ways = []
    if least == 1:
        ways.append(context.typed("array", items=_not(value)))
    elif least > 1:
        ways.append(context.typed("array", contains=value, minContains=0, maxContains=least - 1))
    if most is not None:
        ways.append(context.typed("array", contains=value, minContains=most + 1))
    return ways


def _nothing(_value: Any, _context: _Context) -> Ways:
    """Said by another keyword."""
    return []


def _unique_items(value: bool, context: _Context) -> Ways:
    if value:
        raise context.refuse("uniqueItems", "has no masks")
    return []


def _properties(value: dict[str, Schema], context: _Context) -> Ways:
    return [
        context.typed("object", required=[name], properties={name: _not(schema)})
        for name, schema in value.items()
        if not context.relations.implied(context.facts.member(name), schema)
    ]


def _required(value: list[str], context: _Context) -> Ways:
    missing = [name for name in value if name not in context.facts.required]
    return [context.typed("object", properties={name: False}) for name in missing]


def _by_name(keyword: str) -> Callable[[Any, _Context], Ways]:
    """One of the known properties breaks it; that needs all properties to be known."""

    def rule(value: Any, context: _Context) -> Ways:
        if not context.facts.closed:
            raise context.refuse(keyword, "needs additionalProperties to be false")
        ways: Ways = []
        for name in context.facts.named:
            said = property_schemas({**_listed(context.schema), keyword: value}, name)
            if said and not context.facts.forbids(name):
                wrong = _not({"allOf": said, AT: context.schema.get(AT, "")})
                ways.append(context.typed("object", required=[name], properties={name: wrong}))
        return ways

    return rule


def _listed(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("properties", "patternProperties") if key in schema}


def _property_names(value: Schema, context: _Context) -> Ways:
    if value is False:
        return [context.typed("object", minProperties=1)]
    if not context.facts.closed:
        raise context.refuse("propertyNames", "needs additionalProperties to be false")
    allowed = (name for name in context.facts.named if not context.facts.forbids(name))
    wrong = (name for name in allowed if not context.relations.valid(name, value))
    return [context.typed("object", required=[name]) for name in wrong]


def _dependent_required(value: dict[str, list[str]], context: _Context) -> Ways:
    return [
        context.typed("object", required=[name], properties={need: False})
        for name, needs in value.items()
        for need in needs
        if need != name
    ]


def _dependent_schemas(value: dict[str, Schema], context: _Context) -> Ways:
    return [
        {"allOf": [context.typed("object", required=[name]), _not(schema)], AT: context.schema.get(AT, "")}
        for name, schema in value.items()
    ]


def _reference(value: str, context: _Context) -> Ways:
    return [_not(context.relations.definitions[value.removeprefix(DEFS)])]


def _all_of(value: list[Schema], _context: _Context) -> Ways:
    return [_not(schema) for schema in value]


def _any_of(value: list[Schema], context: _Context) -> Ways:
    return [{"allOf": [_not(schema) for schema in value], AT: context.schema.get(AT, "")}]


def _one_of(value: list[Schema], context: _Context) -> Ways:
    """None of them, or two of them."""
    if len(value) > MOST_COMPARED:
        raise context.refuse("oneOf", f"needs at most {MOST_COMPARED} alternatives")
    pairs = [
        {"allOf": [one, other], AT: context.schema.get(AT, "")}
        for i, one in enumerate(value)
        for other in value[i + 1 :]
    ]
    return [*_any_of(value, context), *pairs]


def _double(value: Schema, _context: _Context) -> Ways:
    return [value]


def _if(value: Schema, context: _Context) -> Ways:
    at = context.schema.get(AT, "")
    yes, no = context.schema.get("then", True), context.schema.get("else", True)
    return [{"allOf": [value, _not(yes)], AT: at}, {"allOf": [_not(value), _not(no)], AT: at}]


_RULES: dict[str, Callable[[Any, _Context], Ways]] = {
    "type": _type,
    "enum": _enum,
    "minimum": _turned("number", "exclusiveMaximum"),
    "maximum": _turned("number", "exclusiveMinimum"),
    "exclusiveMinimum": _turned("number", "maximum"),
    "exclusiveMaximum": _turned("number", "minimum"),
    "minLength": _turned("string", "maxLength", -1),
    "maxLength": _turned("string", "minLength", 1),
    "minItems": _turned("array", "maxItems", -1),
    "maxItems": _turned("array", "minItems", 1),
    "minProperties": _turned("object", "maxProperties", -1),
    "maxProperties": _turned("object", "minProperties", 1),
    "pattern": _pattern,
    "items": _items,
    "prefixItems": _prefix_items,
    "contains": _contains,
    "minContains": _nothing,
    "maxContains": _nothing,
    "uniqueItems": _unique_items,
    "properties": _properties,
    "required": _required,
    "patternProperties": _by_name("patternProperties"),
    "additionalProperties": _by_name("additionalProperties"),
    "propertyNames": _property_names,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "$ref": _reference,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _double,
    "if": _if,
    "then": _nothing,
    "else": _nothing,
}
