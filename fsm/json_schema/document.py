"""A schema document: its resources, anchors and where references lead. Nothing is ever fetched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urldefrag, urljoin

from trellis.errors import ConstraintError
from trellis.fsm.json_schema.dialect import (
    LIST_OF_SCHEMAS,
    MAP_OF_SCHEMAS,
    ONE_SCHEMA,
    UNNAMED,
    Dialect,
    dialect_named,
)
from trellis.fsm.json_schema.errors import malformed
from trellis.fsm.json_schema.pointer import child, segments
from trellis.fsm.limits import Limits

_INDEX = re.compile("0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Resource:
    """A schema with an identity of its own (the root, or one with ``$id``) and what is known by name in it.

    anchors, dynamic_anchors: name to pointer. recursive: ``$recursiveAnchor`` is true at its root.
    """

    uri: str
    pointer: str
    dialect: Dialect
    recursive: bool = False
    anchors: dict[str, str] = field(default_factory=dict)
    dynamic_anchors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """A schema in the document."""

    pointer: str
    schema: Any
    resource: Resource


def subschemas(schema: dict[str, Any], pointer: str) -> Iterator[tuple[str, Any]]:
    """Schemas directly inside, with their pointers; what is no schema (names, constants) is not entered."""
    for keyword, value in schema.items():
        at = child(pointer, keyword)
        if keyword in ONE_SCHEMA and isinstance(value, dict | bool):
            yield at, value
        elif keyword in LIST_OF_SCHEMAS and isinstance(value, list):
            yield from ((child(at, i), item) for i, item in enumerate(value))
        elif keyword in MAP_OF_SCHEMAS and isinstance(value, dict):
            for name, item in value.items():
                if not (keyword == "dependencies" and isinstance(item, list)):
                    yield child(at, name), item


class Document:
    """Raises ConstraintError when it is too deep or holds too many schemas, or names an unknown draft."""

    def __init__(self, schema: Any, limits: Limits) -> None:
        self.schema = schema
        self._resources: dict[str, Resource] = {}
        self._places: dict[str, Place] = {}
        self._limits = limits
        self._index()

    @property
    def root(self) -> Place:
        return self._places["#"]

    def at(self, pointer: str) -> Place:
        return self._places[pointer]

    def find(self, pointer: str) -> Place | None:
        """The schema there, if that is a place of a schema."""
        return self._places.get(pointer)

    def _index(self) -> None:
        pending: list[tuple[str, Any, Resource | None, int]] = [("#", self.schema, None, 0)]
        while pending:
            pointer, schema, outer, depth = pending.pop()
            if depth > self._limits.schema_depth:
                raise ConstraintError(
                    "schema", "limit", pointer, f"schemas nest deeper than {self._limits.schema_depth}"
                )
            resource = self._resource(pointer, schema, outer)
            self._places[pointer] = Place(pointer, schema, resource)
            if len(self._places) > self._limits.subschemas:
                raise ConstraintError(
                    "schema",
                    "limit",
                    pointer,
                    f"more than {self._limits.subschemas} schemas inside the schema",
                )
            if isinstance(schema, dict):
                self._read_anchors(schema, pointer, resource)
                inside = list(subschemas(schema, pointer))
                pending.extend((at, item, resource, depth + 1) for at, item in reversed(inside))

    def _resource(self, pointer: str, schema: Any, outer: Resource | None) -> Resource:
        """The resource that this schema begins, or the one around it."""
        named = schema if isinstance(schema, dict) else {}
        dialect = outer.dialect if outer else UNNAMED
        if isinstance(named.get("$schema"), str) and (outer is None or _identity(named, dialect)):
            found = dialect_named(named["$schema"])
            if found is None:
                reason = f"unknown draft {named['$schema']!r}; drafts 4, 6, 7, 2019-09 and 2020-12 are known"
                raise ConstraintError("schema", "unsupported", child(pointer, "$schema"), reason)
            dialect = found
        identity = _identity(named, dialect)
        if outer is not None and not identity:
            return outer
        uri = urldefrag(urljoin(outer.uri if outer else "", identity)).url
        recursive = named.get("$recursiveAnchor") is True and "$recursiveRef" in dialect.keywords
        resource = Resource(uri, pointer, dialect, recursive)
        self._resources.setdefault(uri, resource)
        return resource

    def _read_anchors(self, schema: dict[str, Any], pointer: str, resource: Resource) -> None:
        identity = schema.get(resource.dialect.id_keyword)
        if resource.dialect.ref_stands_alone:
            if isinstance(identity, str) and identity.startswith("#") and "$ref" not in schema:
                resource.anchors[identity[1:]] = pointer
            return
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                resource.anchors[schema[keyword]] = pointer
        if isinstance(schema.get("$dynamicAnchor"), str):
            resource.dynamic_anchors[schema["$dynamicAnchor"]] = pointer

    def resolve(self, reference: Any, place: Place, keyword: str = "$ref") -> Place:
        """The place that a reference leads to. ConstraintError if that is outside the document or nowhere."""
        where = child(place.pointer, keyword)
        if not isinstance(reference, str):
            raise malformed(where, f"{keyword} must be a string")
        try:
            uri, fragment = urldefrag(urljoin(place.resource.uri, reference))
        except ValueError as error:
            raise malformed(where, f"{reference!r} is not a URI reference: {error}") from None
        resource = place.resource if reference.startswith("#") else self._resources.get(uri)
        if resource is None:
            reason = f"{reference!r} lies outside the schema; only local references are followed"
            raise ConstraintError("schema", "unsupported", where, reason)
        if not reference.startswith("#"):
            reference = f"#{fragment}"
        for start in (resource, self.root.resource):
            target = self._inside(start, reference[1:])
            if target is not None:
                return target
        raise malformed(where, f"{reference!r} leads nowhere")

    def _inside(self, resource: Resource, fragment: str) -> Place | None:
        if fragment and not fragment.startswith("/"):
            pointer = resource.anchors.get(fragment)
            return self._places[pointer] if pointer else None
        pointer = resource.pointer
        for key in segments(fragment):
            pointer = child(pointer, key)
        return self._places.get(pointer) or self._unlisted(pointer, resource)

    def _unlisted(self, pointer: str, resource: Resource) -> Place | None:
        """A reference may lead to a schema under a keyword that no draft knows."""
        value = self.schema
        for key in segments(pointer[1:].replace("%", "%25")):
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and _INDEX.fullmatch(key) and int(key) < len(value):
                value = value[int(key)]
            else:
                return None
        place = Place(pointer, value, resource)
        self._places[pointer] = place
        return place


def _identity(schema: dict[str, Any], dialect: Dialect) -> str:
    """The ``$id``, if it names a resource: it is no mere anchor, and no ``$ref`` makes it void."""
    identity = schema.get(dialect.id_keyword)
    if not isinstance(identity, str) or (dialect.ref_stands_alone and "$ref" in schema):
        return ""
    return urldefrag(identity).url
