"""What a conjunction of schemas says about a value, read off its parts without solving anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from trellis.fsm.json_schema.matching import matches
from trellis.fsm.json_schema.normalise import DEFS, Schema
from trellis.fsm.json_schema.values import EVERY_TYPE, type_of, types_named

_INFINITY = float("inf")


class Facts:
    """The parts of ``allOf`` and the targets of ``$ref`` are followed; alternatives are not.

    parts: the plain schemas that all hold. impossible: one of them is ``false``. types: what the value may be.
    """

    def __init__(self, schemas: Iterable[Schema], definitions: dict[str, Schema]) -> None:
        self.definitions = definitions
        self.parts: list[dict[str, Any]] = []
        self.impossible = False
        self._followed: set[str] = set()
        self._seen: set[int] = set()
        for schema in schemas:
            self._add(schema)
        self.types = self._types()

    def _add(self, schema: Schema) -> None:
        if isinstance(schema, bool):
            self.impossible |= not schema
            return
        if id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        self.parts.append(schema)
        for part in schema.get("allOf", ()):
            self._add(part)
        reference = schema.get("$ref")
        if reference is not None and reference not in self._followed:
            self._followed.add(reference)
            self._add(self.definitions.get(reference.removeprefix(DEFS), True))

    def _types(self) -> frozenset[str]:
        types = EVERY_TYPE
        for part in self.parts:
            if "type" in part:
                types &= types_named(part["type"])
            if "enum" in part:
                types &= {type_of(value) for value in part["enum"]}
        return types if not self.impossible else frozenset()

    def having(self, keyword: str) -> Iterator[Any]:
        return (part[keyword] for part in self.parts if keyword in part)

    def holds(self, keyword: str) -> bool:
        return any(keyword in part for part in self.parts)

    def least(self, keyword: str) -> float:
        """The strictest of upper bounds."""
        return min(self.having(keyword), default=_INFINITY)

    def most(self, keyword: str, default: float = 0) -> float:
        """The strictest of lower bounds."""
        return max(self.having(keyword), default=default)

    # Objects

    @cached_property
    def required(self) -> dict[str, None]:
        """In the order in which they are named."""
        return dict.fromkeys(name for names in self.having("required") for name in names)

    @cached_property
    def named(self) -> dict[str, None]:
        """Every property that is spoken of by name."""
        listed = dict.fromkeys(name for names in self.having("properties") for name in names)
        return {**listed, **self.required}

    @cached_property
    def closed(self) -> bool:
        """Only named properties can be there."""
        return any(
            part.get("additionalProperties") is False
            and all(schema is False for schema in part.get("patternProperties", {}).values())
            for part in self.parts
        )

    def member(self, name: str) -> list[Schema]:
        """What is said about the value of a property."""
        return [schema for part in self.parts for schema in property_schemas(part, name)]

    def forbids(self, name: str) -> bool:
        return any(schema is False for schema in self.member(name))

    # Arrays

    @cached_property
    def most_items(self) -> float:
        most = self.least("maxItems")
        for part in self.parts:
            if part.get("items") is False:
                most = min(most, len(part.get("prefixItems", ())))
            prefix = part.get("prefixItems", ())
            most = min([most, *(i for i, schema in enumerate(prefix) if schema is False)])
        return most

    @cached_property
    def prefix(self) -> int:
        """Length of the longest ``prefixItems``."""
        return max((len(items) for items in self.having("prefixItems")), default=0)

    def item(self, index: int) -> list[Schema]:
        """What is said about an item; past every prefix all items are alike."""
        found: list[Schema] = []
        for part in self.parts:
            prefix = part.get("prefixItems", ())
            if index < len(prefix):
                found.append(prefix[index])
            elif "items" in part:
                found.append(part["items"])
        return found


def property_schemas(part: dict[str, Any], name: str) -> list[Schema]:
    found = [part["properties"][name]] if name in part.get("properties", {}) else []
    for pattern, schema in part.get("patternProperties", {}).items():
        if matches(pattern, name):
            found.append(schema)
    if not found and "additionalProperties" in part:
        found.append(part["additionalProperties"])
    return found
