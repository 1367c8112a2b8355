"""Which properties and items of a value a schema has looked at: what ``unevaluated*`` leaves to itself.

A part of a schema counts only if it holds for the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trellis.fsm.json_schema.matching import matches

if TYPE_CHECKING:
    from trellis.fsm.json_schema.normalise import Schema
    from trellis.fsm.json_schema.validation import Question


def is_listed(name: str, schema: dict[str, Any]) -> bool:
    """Is the property spoken of by name or by pattern?"""
    return name in schema.get("properties", ()) or any(
        matches(pattern, name) for pattern in schema.get("patternProperties", ())
    )


def evaluated_names(
    question: Question, value: dict[str, Any], schema: dict[str, Any], but: str = ""
) -> set[str]:
    """but: a keyword of the schema itself that does not count."""
    found: set[str] = set()
    for part in _parts(question, value, schema):
        all_of_them = {"additionalProperties", "unevaluatedProperties"} & part.keys()
        if all_of_them - ({but} if part is schema else set()):
            return set(value)
        found |= {name for name in value if is_listed(name, part)}
    return found


def evaluated_items(question: Question, value: list[Any], schema: dict[str, Any], but: str = "") -> set[int]:
    """Positions. but: see above."""
    found: set[int] = set()
    for part in _parts(question, value, schema):
        if {"items", "unevaluatedItems"} & part.keys() - ({but} if part is schema else set()):
            return set(range(len(value)))
        found |= set(range(len(part.get("prefixItems", ()))))
        if "contains" in part:
            found |= {i for i, item in enumerate(value) if question.holds(item, part["contains"])}
    return found


def _parts(question: Question, value: Any, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema, which holds apart from the keyword asked about, and all inside that apply to the value, too."""
    seen: set[int] = set()
    pending: list[Schema] = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            yield part
            pending.extend(_in_place(question, value, part))


def _in_place(question: Question, value: Any, schema: dict[str, Any]) -> Iterator[Schema]:
    if "$ref" in schema:
        yield question.definition(schema["$ref"])
    for keyword in ("allOf", "anyOf", "oneOf"):
        yield from (inner for inner in schema.get(keyword, ()) if question.holds(value, inner))
    if isinstance(value, dict):
        for name, inner in schema.get("dependentSchemas", {}).items():
            if name in value:
                yield inner
    if "if" in schema:
        if question.holds(value, schema["if"]):
            yield schema["if"]
            yield schema.get("then", True)
        else:
            yield schema.get("else", True)
