"""References into a recursion that stand beside other keywords.

The engine merges what holds together, and cannot merge something with a definition that contains itself. So
such a conjunction becomes a definition of its own, and a union is distributed over what stands beside it until
every recursive reference stands alone.
"""

from __future__ import annotations

import json
from typing import Any

from trellis.fsm.json_schema.normalise import AT, DEFS, Schema
from trellis.fsm.json_schema.relations import Relations


class Recursion:
    """Adds definitions to the ones it is given."""

    def __init__(self, relations: Relations) -> None:
        self._relations = relations
        self._definitions = relations.definitions
        self._recursive = _recursive(self._definitions)
        self._joined: dict[str, str] = {}

    def stand_alone(self, base: dict[str, Any], parts: list[Schema]) -> Schema | None:
        """A schema that means the same as base and parts together, if they need it; else None."""
        if not self._recursive:
            return None
        together = [schema for schema in _flat([_without(base, "anyOf"), *parts]) if schema is not True]
        if "anyOf" in base:
            together.append({"anyOf": base["anyOf"], AT: base.get(AT, "")})
        if len(together) < 2 and not (together and _beside_reference(together[0])):
            return None
        for i, schema in enumerate(together):
            if isinstance(schema, dict) and self._refers(schema):
                others = [*together[:i], *together[i + 1 :]]
                rest = _without(schema, "$ref")
                return self._join(schema["$ref"], [*others, *([rest] if _content(rest) else [])], base)
        for i, schema in enumerate(together):
            if isinstance(schema, dict) and schema.keys() <= {"anyOf", AT} and self._exposed(schema):
                others = [*together[:i], *together[i + 1 :]]
                branches = [{"allOf": [*others, branch], AT: base.get(AT, "")} for branch in schema["anyOf"]]
                return {"anyOf": branches, AT: base.get(AT, "")}
        return None

    def _refers(self, schema: dict[str, Any]) -> bool:
        return schema.get("$ref", "").removeprefix(DEFS) in self._recursive

    def _exposed(self, schema: Schema) -> bool:
        """Does a recursive reference apply to the same value?"""
        if not isinstance(schema, dict):
            return False
        inside = [inner for keyword in ("allOf", "anyOf") for inner in schema.get(keyword, ())]
        return self._refers(schema) or any(self._exposed(inner) for inner in inside)

    def _join(self, reference: str, others: list[Schema], base: dict[str, Any]) -> Schema:
        target = self._definitions[reference.removeprefix(DEFS)]
        new = [other for other in others if not self._relations.implied([target], other)]
        if not new:
            return {"$ref": reference, AT: base.get(AT, "")}
        key = json.dumps([reference, _bare(new)], sort_keys=True)
        if key not in self._joined:
            name = f"{reference.removeprefix(DEFS)}-{len(self._joined)}"
            self._joined[key] = name
            self._definitions[name] = {"allOf": [*new, target], AT: base.get(AT, "")}
            self._recursive.add(name)
        return {"$ref": DEFS + self._joined[key], AT: base.get(AT, "")}


def _without(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != keyword}


def _content(schema: Schema) -> bool:
    return not isinstance(schema, dict) or bool(schema.keys() - {AT})


def _beside_reference(schema: Schema) -> bool:
    return isinstance(schema, dict) and "$ref" in schema and bool(schema.keys() - {AT, "$ref"})


def _flat(schemas: list[Schema]) -> list[Schema]:
    """Without ``allOf`` around, and without what says nothing."""
    found: list[Schema] = []
    for schema in schemas:
        if isinstance(schema, dict) and "allOf" in schema:
            found.extend(_flat([_without(schema, "allOf"), *schema["allOf"]]))
        elif _content(schema):
            found.append(schema)
    return found


def _bare(value: Any) -> Any:
    """Without the places: they make no difference."""
    if isinstance(value, dict):
        return {key: _bare(inner) for key, inner in value.items() if key != AT}
    return [_bare(inner) for inner in value] if isinstance(value, list) else value


def _recursive(definitions: dict[str, Schema]) -> set[str]:
    """Names of definitions that refer to themselves, however far inside (strong components: Tarjan, 1972)."""
    inside = {name: _references(schema) for name, schema in definitions.items()}
    found: set[str] = set()
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}  # of the names still open: the first one that they lead back to
    stack: list[str] = []
    for start in inside:
        path = [(start, iter(inside[start]))] if start not in order else []
        while path:
            name, rest = path[-1]
            if name not in order:
                order[name] = lowest[name] = len(order)
                stack.append(name)
            for inner in rest:
                if inner not in order:
                    path.append((inner, iter(inside.get(inner, ()))))
                    break
                if inner in lowest:
                    lowest[name] = min(lowest[name], lowest[inner])
            else:
                path.pop()
                if path:
                    outer = path[-1][0]
                    lowest[outer] = min(lowest[outer], lowest[name])
                if lowest[name] == order[name]:
                    found |= _closed(name, stack, lowest, inside)
    return found


def _closed(name: str, stack: list[str], lowest: dict[str, int], inside: dict[str, list[str]]) -> set[str]:
    """Takes the component that begins with a name from the stack; returns it if it is a cycle."""
    at = stack.index(name)
    component = set(stack[at:])
    del stack[at:]
    for member in component:
        del lowest[member]
    return component if len(component) > 1 or name in inside[name] else set()


def _references(schema: Schema) -> list[str]:
    found: list[str] = []
    pending: list[Any] = [schema]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, dict):
            for keyword, value in item.items():
                if keyword == "$ref" and isinstance(value, str):
                    found.append(value.removeprefix(DEFS))
                elif keyword in ("properties", "patternProperties", "dependentSchemas"):
                    pending.extend(value.values())
                elif keyword != "enum":
                    pending.append(value)
    return found
