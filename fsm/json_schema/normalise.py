"""From a schema of any draft to the one form that everything else in this package works on.

The result is JSON schema 2020-12 without annotations: references are ``#/$defs/NAME`` to definitions that are
schemas of the same form, ``const`` is an ``enum`` of one, ``items`` is one schema, formats are patterns,
dependencies are split into their two kinds, patterns are those of ``patterns.translate``. Each schema
remembers in ``AT`` where it stood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trellis.errors import ConstraintError
from trellis.fsm.json_schema.dialect import ANNOTATIONS, ASSERTIONS, LIST_OF_SCHEMAS
from trellis.fsm.json_schema.document import Document, Place
from trellis.fsm.json_schema.errors import Unenforceable, malformed
from trellis.fsm.json_schema.formats import HINTS, format_schema
from trellis.fsm.json_schema.keywords import READERS, read_number, read_pattern, read_patterns
from trellis.fsm.json_schema.pointer import child
from trellis.fsm.limits import Limits

AT = "$at"
DEFS = "#/$defs/"
Schema = Any  # bool, or a dict in the form described above
# Dynamic anchors in reach: name to the pointer of the outermost schema that holds it.
Scope = tuple[tuple[str, str], ...]
_RECURSION = ""  # the name that ``$recursiveRef`` looks for
_MOST_NAMES = {"patternProperties": 256, "dependentSchemas": 256}
_MOST_ANCHORS = 64  # dynamic ones that are in reach
_NOT_MONOTONE = frozenset({"not", "if", "oneOf", "contains"})


@dataclass
class Normal:
    """root and definitions. dropped: what is neither enforced nor checked, in non-strict mode. warnings: sentences."""

    root: Schema
    definitions: dict[str, Schema]
    dropped: list[Unenforceable] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def normalise(document: Document, strict: bool, limits: Limits) -> Normal:
    """Raises ConstraintError for a malformed schema; Unenforceable in strict mode."""
    normaliser = _Normaliser(document, strict, limits)
    root = document.root
    name = normaliser.reference(root, normaliser.enter((), root))
    normaliser.drain()
    return Normal(
        {"$ref": DEFS + name, AT: "#"}, normaliser.definitions, normaliser.dropped, normaliser.warnings()
    )


class _Normaliser:
    def __init__(self, document: Document, strict: bool, limits: Limits) -> None:
        self.definitions: dict[str, Schema] = {}
        self.dropped: list[Unenforceable] = []
        self._document = document
        self._strict = strict
        self._limits = limits
        self._names: dict[tuple[str, Scope], str] = {}
        self._pending: list[tuple[str, Place, Scope]] = []
        self._ignored: dict[str, str] = {}
        self._made = 0
        self._weakening_is_unsafe = 0  # inside how many keywords a weaker schema would forbid more

    # References

    def reference(self, place: Place, scope: Scope) -> str:
        """Name of the definition for a place under a scope; it is made later."""
        key = place.pointer, scope
        if key not in self._names:
            name = f"{len(self._names)}"
            self._names[key] = name
            self._pending.append((name, place, scope))
        return self._names[key]

    def drain(self) -> None:
        while self._pending:
            name, place, scope = self._pending.pop()
            self.definitions[name] = self.schema(place, scope)

    def enter(self, scope: Scope, place: Place) -> Scope:
        """The scope inside the resource of a place: what was in reach before stays in front."""
        resource = place.resource
        found = dict(scope)
        for name, pointer in resource.dynamic_anchors.items():
            found.setdefault(name, pointer)
        if resource.recursive:
            found.setdefault(_RECURSION, resource.pointer)
        if len(found) > _MOST_ANCHORS:
            reason = f"more than {_MOST_ANCHORS} dynamic anchors are in reach"
            raise ConstraintError("schema", "limit", place.pointer, reason)
        return tuple(sorted(found.items()))

    def _follow(self, keyword: str, reference: Any, place: Place, scope: Scope) -> Schema:
        target = self._document.resolve(reference, place, keyword)
        if keyword == "$dynamicRef":
            anchor = reference.partition("#")[2]
            if target.resource.dynamic_anchors.get(anchor) == target.pointer:
                target = self._document.at(dict(self.enter(scope, target)).get(anchor, target.pointer))
        elif keyword == "$recursiveRef" and target.resource.recursive:
            target = self._document.at(dict(self.enter(scope, target))[_RECURSION])
        return {"$ref": DEFS + self.reference(target, self.enter(scope, target))}

    # Schemas

    def schema(self, place: Place, scope: Scope) -> Schema:
        value, pointer = place.schema, place.pointer
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise malformed(pointer, f"a schema is an object, true or false, not {value!r:.60}")
        self._limits.check_wanted()
        self._made += 1
        if self._made > self._limits.subschemas:
            reason = f"its references spell out more than {self._limits.subschemas} schemas"
            raise ConstraintError("schema", "limit", pointer, reason)
        dialect = place.resource.dialect
        alone = "$ref" in value and dialect.ref_stands_alone
        result: dict[str, Any] = {AT: pointer}
        parts: list[Schema] = []
        dropped: set[str] = set()
        for keyword in ["$ref"] if alone else value:
            if keyword not in dialect.keywords:
                self._ignore(keyword, pointer, dialect.name)
                continue
            unsafe = keyword in _NOT_MONOTONE or any(name.startswith("unevaluated") for name in value)
            try:
                with self._unsafe_to_weaken(unsafe):
                    self._keyword(keyword, place, scope, result, parts)
            except Unenforceable as refusal:
                if self._strict or self._weakening_is_unsafe:
                    raise
                self.dropped.append(refusal)
                dropped.add(keyword)
                if keyword == "oneOf":
                    branches = [self._inside(place, scope, keyword, i) for i in range(len(value[keyword]))]
                    parts.append({"anyOf": branches, AT: pointer})
        if "patternProperties" in dropped:  # what it covered would become additional
            result.pop("additionalProperties", None)
        if parts:
            result["allOf"] = [*result.get("allOf", []), *parts]
        return result

    @contextmanager
    def _unsafe_to_weaken(self, unsafe: bool) -> Iterator[None]:
        self._weakening_is_unsafe += unsafe
        try:
            yield
        finally:
            self._weakening_is_unsafe -= unsafe

    def _keyword(
        self, keyword: str, place: Place, scope: Scope, result: dict[str, Any], parts: list[Schema]
    ) -> None:
        """Put what one keyword says into the result; parts are schemas that hold besides."""
        value, at = place.schema[keyword], child(place.pointer, keyword)
        if keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            followed = self._follow(keyword, value, place, scope)
            if "$ref" in result:
                parts.append(followed)
            else:
                result.update(followed)
        elif keyword == "pattern":
            parts.extend(self._pattern(value, place.pointer, at))
        elif keyword in READERS:
            result[keyword] = READERS[keyword](value, at)
            if keyword == "required":
                self._check_count(result[keyword], self._limits.properties, "required properties", at)
        elif keyword in _OTHERS:
            result.update(_OTHERS[keyword](place.schema, value, at))
        elif keyword == "const":
            parts.append({"enum": [value], AT: place.pointer})
        elif keyword == "format":
            parts.extend(_format(place, value))
        elif keyword == "items":
            result.update(self._items(place, scope))
        elif keyword == "additionalItems":
            if isinstance(place.schema.get("items"), list):
                result["items"] = self._inside(place, scope, keyword)
        elif keyword == "dependencies":
            result.update(self._dependencies(place, scope, result))
        elif keyword == "patternProperties":
            result[keyword] = self._pattern_properties(place, scope)
        elif keyword in ("properties", "dependentSchemas"):
            made = self._map(place, scope, keyword, value)
            result[keyword] = {**result.get(keyword, {}), **made}
        elif keyword in LIST_OF_SCHEMAS:
            if not isinstance(value, list):
                raise malformed(at, "must be a list of schemas")
            made_list = [self._inside(place, scope, keyword, i) for i in range(len(value))]
            result[keyword] = [*result.get(keyword, []), *made_list]
        else:
            result[keyword] = self._inside(place, scope, keyword)

    def _pattern(self, value: Any, pointer: str, at: str) -> list[Schema]:
        """Look-ahead at the start of a pattern holds, or does not, along with the rest."""
        try:
            alike, unlike = read_patterns(value, at)
        except Unenforceable as refusal:
            raise Unenforceable("pattern", pointer, refusal.reason) from None
        found: list[Schema] = [{"pattern": pattern, AT: pointer} for pattern in alike]
        return [*found, *({"not": {"pattern": pattern, AT: pointer}, AT: pointer} for pattern in unlike)]

    def _inside(self, place: Place, scope: Scope, *keys: str | int) -> Schema:
        value, pointer = place.schema, place.pointer
        for key in keys:
            value, pointer = value[key], child(pointer, key)
        found = self._document.find(pointer)
        resource = found.resource if found else place.resource
        inner = Place(pointer, value, resource)
        if resource is not place.resource:
            scope = self.enter(scope, inner)
        return self.schema(inner, scope)

    def _map(self, place: Place, scope: Scope, keyword: str, value: Any) -> dict[str, Schema]:
        if not isinstance(value, dict):
            raise malformed(child(place.pointer, keyword), "must be an object of schemas")
        if keyword in _MOST_NAMES or keyword == "properties":
            most = _MOST_NAMES.get(keyword, self._limits.properties)
            self._check_count(value, most, keyword, child(place.pointer, keyword))
        return {name: self._inside(place, scope, keyword, name) for name in value}

    def _check_count(self, found: Sized, most: int, what: str, at: str) -> None:
        if len(found) > most:
            reason = f"an object has {len(found)} {what}; at most {most} are allowed"
            raise ConstraintError("schema", "limit", at, reason)

    def _pattern_properties(self, place: Place, scope: Scope) -> dict[str, Schema]:
        made: dict[str, Schema] = {}
        for pattern, schema in self._map(
            place, scope, "patternProperties", place.schema["patternProperties"]
        ).items():
            try:
                name = read_pattern(pattern, child(place.pointer, "patternProperties"))
            except Unenforceable as refusal:
                raise Unenforceable("patternProperties", place.pointer, refusal.reason) from None
            made[name] = {"allOf": [made[name], schema], AT: place.pointer} if name in made else schema
        return made

    def _items(self, place: Place, scope: Scope) -> dict[str, Schema]:
        """Up to draft 2019-09 a list is what is ``prefixItems`` now."""
        value = place.schema["items"]
        if not isinstance(value, list):
            return {"items": self._inside(place, scope, "items")}
        if "prefixItems" in place.schema:
            raise malformed(place.pointer, "a list of items and prefixItems exclude each other")
        return {"prefixItems": [self._inside(place, scope, "items", i) for i in range(len(value))]}

    def _dependencies(self, place: Place, scope: Scope, result: dict[str, Any]) -> dict[str, Any]:
        value, at = place.schema["dependencies"], child(place.pointer, "dependencies")
        if not isinstance(value, dict):
            raise malformed(at, "must be an object of lists of names and schemas")
        names = dict(result.get("dependentRequired", {}))
        schemas = dict(result.get("dependentSchemas", {}))
        for name, needs in value.items():
            if isinstance(needs, list | str):  # a lone name is of draft 3, and still found
                names[name] = READERS["required"]([needs] if isinstance(needs, str) else needs, at)
            else:
                schemas[name] = self._inside(place, scope, "dependencies", name)
        made = {"dependentRequired": names, "dependentSchemas": schemas}
        return {keyword: held for keyword, held in made.items() if held}

    # Warnings

    def _ignore(self, keyword: str, pointer: str, dialect: str) -> None:
        if keyword in ASSERTIONS:
            if keyword != "format":
                self._ignored.setdefault(
                    f"keyword {keyword!r} does not belong to draft {dialect} and is ignored", pointer
                )
            else:
                self._ignored.setdefault(
                    f"'format' asserts nothing in draft {dialect}; name no draft to have it enforced", pointer
                )
        elif keyword not in ANNOTATIONS and not keyword.startswith("x-"):
            self._ignored.setdefault(f"unknown keyword {keyword!r} is ignored", pointer)

    def warnings(self) -> list[str]:
        return [f"{sentence} (at {pointer})" for sentence, pointer in self._ignored.items()]


def _bound(keyword: str, exclusive: str) -> Callable[[dict[str, Any], Any, str], dict[str, Any]]:
    """In draft 4 the exclusive bound is a flag beside the bound."""

    def read(schema: dict[str, Any], value: Any, at: str) -> dict[str, Any]:
        number = read_number(value, at)
        return {exclusive if schema.get(exclusive) is True else keyword: number}

    return read


def _exclusive(_schema: dict[str, Any], value: Any, at: str) -> dict[str, Any]:
    keyword = at.rpartition("/")[2]
    if isinstance(value, bool):
        return {}
    return {keyword: read_number(value, at)}


_OTHERS: dict[str, Callable[[dict[str, Any], Any, str], dict[str, Any]]] = {
    "minimum": _bound("minimum", "exclusiveMinimum"),
    "maximum": _bound("maximum", "exclusiveMaximum"),
    "exclusiveMinimum": _exclusive,
    "exclusiveMaximum": _exclusive,
}


def _format(place: Place, value: Any) -> list[Schema]:
    if not isinstance(value, str):
        raise malformed(child(place.pointer, "format"), "must be the name of a format")
    known = format_schema(value)
    if known is not None:
        return [{**known, AT: place.pointer}]
    declared = place.schema.get("type", "string")
    about_strings = not isinstance(declared, str | list) or "string" in declared
    if value in HINTS or not about_strings:
        return []
    raise Unenforceable("format", place.pointer, f"format {value!r} is not known; write it as a pattern")
