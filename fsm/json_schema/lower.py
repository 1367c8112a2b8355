"""The rewriting of a schema until only keywords are left that masks enforce.

``lower`` walks a schema from the outside in. At every schema the rewrites (see ``REWRITES``) replace one
keyword each by schemas without it, knowing what holds there anyway; what they produce is walked in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trellis.errors import ConstraintError
from trellis.fsm.json_schema.cycles import check_cycles
from trellis.fsm.json_schema.errors import Unenforceable
from trellis.fsm.json_schema.inhabited import drop_endless
from trellis.fsm.json_schema.normalise import AT, DEFS, Normal, Schema
from trellis.fsm.json_schema.plain import plain, without_parts
from trellis.fsm.json_schema.recursion import Recursion
from trellis.fsm.json_schema.regular import PatternAlgebra
from trellis.fsm.json_schema.relations import Relations
from trellis.fsm.json_schema.rewrites import REWRITES, Scene
from trellis.fsm.json_schema.values import FRACTION, INTEGER, names_of, types_named
from trellis.fsm.limits import Budget, Limits

_DEPTH = 150  # of schemas inside each other while they are spelled out
_PRODUCT = 4_096  # alternatives that one object may have when all its unions are multiplied


@dataclass
class Lowered:
    root: Schema
    definitions: dict[str, Schema]
    dropped: list[Unenforceable]
    warnings: list[str]


def lower(normal: Normal, strict: bool, limits: Limits) -> Lowered:
    """Raises Unenforceable (only if strict) and ConstraintError (``limit``, ``empty``)."""
    check_cycles(normal.definitions)
    lowering = _Lowering(normal.definitions, strict, limits)
    root = lowering.lower(normal.root, ())
    lowering.drain()
    root = drop_endless(root, lowering.lowered, lowering.tick)
    if root is False:
        raise ConstraintError("schema", "empty", "#", "no finite value satisfies the schema")
    return Lowered(root, lowering.lowered, lowering.dropped, lowering.warnings)


class _Lowering:
    def __init__(self, definitions: dict[str, Schema], strict: bool, limits: Limits) -> None:
        self.lowered: dict[str, Schema] = {}
        self.dropped: list[Unenforceable] = []
        self.warnings: list[str] = []
        self._definitions = definitions
        self._strict = strict
        self._limits = limits
        budget = Budget("schema", limits)
        budget.start(limits.compile_s)
        self.tick = budget.tick
        self._relations = Relations(definitions, PatternAlgebra(self.tick), self.tick)
        self._recursion = Recursion(self._relations)
        self._pending: list[str] = []
        self._depth = 0
        self._made = 0

    def drain(self) -> None:
        while self._pending:
            name = self._pending.pop()
            if name not in self.lowered:
                self.lowered[name] = self.lower(self._definitions[name], ())

    def lower(self, schema: Schema, given: Sequence[Schema]) -> Schema:
        """given: schemas that hold for the same value, and are lowered elsewhere."""
        if isinstance(schema, bool):
            return schema
        self.tick()
        self._made += 1
        if self._made > self._limits.subschemas:
            raise ConstraintError(
                "schema",
                "limit",
                schema.get(AT, ""),
                f"it spells out to more than {self._limits.subschemas} schemas",
            )
        if self._depth >= _DEPTH:
            raise Unenforceable("$ref", schema.get(AT, ""), "the recursion goes through a complement")
        self._depth += 1
        try:
            return self._lower(schema, given)
        finally:
            self._depth -= 1

    def _lower(self, schema: dict[str, Any], given: Sequence[Schema]) -> Schema:
        scene = Scene(dict(schema), given, self._relations, self.warnings.append)
        added: list[Schema] = []
        for keyword, rewrite in REWRITES:
            if keyword in scene.schema:
                try:
                    added.extend(rewrite(scene))
                except Unenforceable as refusal:
                    self._drop(refusal, keyword, schema)
                    scene.schema.pop(keyword, None)
                    if keyword == "patternProperties":  # what it covered would become additional
                        scene.schema.pop("additionalProperties", None)
                    added.extend(refusal.weaker)
        alone = self._recursion.stand_alone(
            {key: value for key, value in scene.schema.items() if key != "allOf"},
            [*scene.schema.get("allOf", ()), *added],
        )
        if alone is not None:
            return self.lower(alone, given)
        result = self._children(scene.schema, given)
        # Each part knows the ones before it, and what is plain of the ones after it.
        known: list[Schema] = [*given, {key: value for key, value in scene.schema.items() if key != "allOf"}]
        pieces = [*scene.schema.get("allOf", ()), *added]
        parts: list[Schema] = []
        for i, part in enumerate(pieces):
            parts.append(self.lower(part, [*known, *pieces[:i], *map(plain, pieces[i + 1 :])]))
        return _joined(result, parts)

    def _drop(self, refusal: Unenforceable, keyword: str, schema: dict[str, Any]) -> None:
        if self._strict:
            raise refusal
        self.dropped.append(Unenforceable(keyword, schema.get(AT, refusal.where), refusal.reason))

    def _children(self, schema: dict[str, Any], given: Sequence[Schema]) -> dict[str, Any]:
        """The schema without ``allOf``; what is inside is lowered knowing what else is said there."""
        known = without_parts(schema)
        facts = self._relations.facts([*given, known])
        result: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword == "properties":
                value = {
                    name: self.lower(inner, _others(facts.member(name), inner))
                    for name, inner in value.items()
                }
            elif keyword == "patternProperties":
                value = {pattern: self.lower(inner, ()) for pattern, inner in value.items()}
            elif keyword in ("additionalProperties", "items"):
                value = self.lower(value, ())
                if value is True or (isinstance(value, dict) and not value.keys() - {AT}):
                    continue
            elif keyword == "prefixItems":
                value = [self.lower(inner, _others(facts.item(i), inner)) for i, inner in enumerate(value)]
            elif keyword == "anyOf":
                value = self._any_of(value, [*given, {key: v for key, v in known.items() if key != "anyOf"}])
            elif keyword == "type":
                value = self._type(value, facts.types, schema)
            elif keyword == "$ref":
                self._pending.append(value.removeprefix(DEFS))
            if keyword != "allOf":
                result[keyword] = value
        return result

    def _any_of(self, branches: list[Schema], given: Sequence[Schema]) -> list[Schema]:
        """In strict mode one branch that cannot be enforced spoils the union, unless it cannot hold anyway."""
        lowered = []
        for branch in branches:
            try:
                lowered.append(self.lower(branch, given))
            except Unenforceable:
                if not self._relations.unsatisfiable([*given, branch]):
                    raise
        return [branch for branch in lowered if branch is not False]

    def _type(self, names: Any, possible: frozenset[str], schema: dict[str, Any]) -> Any:
        types = types_named(names)
        if FRACTION in types and INTEGER not in types:
            if FRACTION in possible:
                self._drop(
                    Unenforceable("not", schema.get(AT, ""), "numbers that are no integers have no mask"),
                    "not",
                    schema,
                )
                return names_of(types | {INTEGER})
            types -= {FRACTION}
        named = names_of(types)
        return named[0] if len(named) == 1 else named


def _others(schemas: list[Schema], inner: Schema) -> list[Schema]:
    return [schema for schema in schemas if schema is not inner]


def _joined(result: dict[str, Any], parts: list[Schema]) -> Schema:
    """The conjunction, as flat as it goes."""
    if any(part is False for part in parts) or any(
        result.get(key) == [] for key in ("anyOf", "type", "enum")
    ):
        return False
    parts = [part for part in parts if not isinstance(part, bool) and len(part.keys() - {AT}) > 0]
    unions = [part["anyOf"] for part in [result, *parts] if "anyOf" in part]
    size = 1
    for union in unions:
        size *= max(1, len(union))
    if size > _PRODUCT:
        raise ConstraintError(
            "schema", "limit", result.get(AT, ""), f"its alternatives combine to more than {_PRODUCT}"
        )
    for part in list(parts):
        if not (part.keys() - {AT}) & result.keys() and not _closes(part) and not _closes(result):
            result.update({key: value for key, value in part.items() if key != AT})
            parts.remove(part)
    if parts:
        result["allOf"] = [*result.get("allOf", ()), *parts]
    return result


def _closes(schema: dict[str, Any]) -> bool:
    """Keywords whose meaning depends on what stands beside them."""
    return bool({"additionalProperties", "items", "prefixItems", "patternProperties"} & schema.keys())
