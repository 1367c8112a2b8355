"""Rewrites of ``unevaluatedProperties`` and ``unevaluatedItems``.

What counts as evaluated depends on which parts of the schema hold for the value. So the ways in which the
parts can hold are listed; in each of them the evaluated names and positions are known, and the keyword becomes
``additionalProperties`` or ``items``. A way may leave open whether more holds: that only evaluates more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from trellis.fsm.json_schema.errors import Unenforceable
from trellis.fsm.json_schema.normalise import AT, DEFS, Schema
from trellis.fsm.json_schema.scene import MOST_BRANCHES, Scene

_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas")
_KEYWORDS = ("unevaluatedProperties", "unevaluatedItems")
_MOST_TOGETHER = 6


@dataclass(frozen=True)
class Way:
    """schemas: what holds. names, patterns: evaluated properties. prefix: evaluated items. all_*: all of them.

    scattered: some items are evaluated, nobody knows which (``contains``).
    """

    schemas: tuple[Schema, ...] = ()
    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    all_properties: bool = False
    prefix: int = 0
    all_items: bool = False
    scattered: bool = False

    def join(self, other: Way) -> Way:
        return Way(
            (*self.schemas, *other.schemas),
            {**self.names, **other.names},
            {**self.patterns, **other.patterns},
            self.all_properties or other.all_properties,
            max(self.prefix, other.prefix),
            self.all_items or other.all_items,
            self.scattered or other.scattered,
        )

    @property
    def evaluates(self) -> bool:
        return bool(
            self.names
            or self.patterns
            or self.all_properties
            or self.prefix
            or self.all_items
            or self.scattered
        )


class _Ways:
    def __init__(self, scene: Scene, keyword: str) -> None:
        self._scene = scene
        self._keyword = keyword

    def of(self, schema: Schema) -> list[Way]:
        """schemas of each way include what the schema itself says."""
        if isinstance(schema, bool):
            return [Way((schema,))]
        if self._keyword in schema:
            return [Way((schema,)).join(_own(schema))]
        if any(keyword in schema for keyword in _KEYWORDS):  # which needs what stands beside it
            return [Way((schema,)).join(way) for way in self.inside(schema)]
        plain = {key: value for key, value in schema.items() if key not in _APPLICATORS}
        return [Way((plain,)).join(way) for way in self.inside(schema)]

    def inside(self, schema: dict[str, Any]) -> list[Way]:
        """schemas of each way: what its applicators say."""
        ways = [_own(schema)]
        for keyword, expand in self._expansions():
            if keyword in schema:
                ways = self._product(ways, expand(schema))
        return ways

    def _product(self, ways: list[Way], others: list[Way]) -> list[Way]:
        if len(ways) * len(others) > MOST_BRANCHES:
            reason = f"there are more than {MOST_BRANCHES} ways to satisfy the schemas beside it"
            raise Unenforceable(self._keyword, self._scene.at, reason)
        return [way.join(other) for way in ways for other in others]

    def _expansions(self) -> Iterable[tuple[str, Callable[[dict[str, Any]], list[Way]]]]:
        return (
            ("$ref", lambda schema: self.of(self._definition(schema["$ref"]))),
            ("allOf", self._all_of),
            ("anyOf", self._any_of),
            ("oneOf", self._one_of),
            ("if", self._conditional),
            ("dependentSchemas", self._dependent),
        )

    def _definition(self, reference: str) -> Schema:
        return self._scene.relations.definitions[reference.removeprefix(DEFS)]

    def _all_of(self, schema: dict[str, Any]) -> list[Way]:
        ways = [Way()]
        for part in schema["allOf"]:
            ways = self._product(ways, self.of(part))
        return ways

    def _any_of(self, schema: dict[str, Any]) -> list[Way]:
        """Every set of branches that may hold together."""
        branches = [self.of(branch) for branch in schema["anyOf"]]
        if not any(way.evaluates for ways in branches for way in ways):
            return [Way(({"anyOf": schema["anyOf"], AT: schema.get(AT, "")},))]
        if len(branches) > _MOST_TOGETHER:
            reason = f"more than {_MOST_TOGETHER} branches of anyOf may hold together"
            raise Unenforceable(self._keyword, self._scene.at, reason)
        found: list[Way] = []
        for size in range(1, len(branches) + 1):
            for chosen in combinations(branches, size):
                ways = [Way()]
                for branch in chosen:
                    ways = self._product(ways, branch)
                found.extend(ways)
        return found

    def _one_of(self, schema: dict[str, Any]) -> list[Way]:
        whole = Way(({"oneOf": schema["oneOf"], AT: schema.get(AT, "")},))
        branches = [self.of(branch) for branch in schema["oneOf"]]
        if not any(way.evaluates for ways in branches for way in ways):
            return [whole]
        return [whole.join(way) for ways in branches for way in ways]

    def _conditional(self, schema: dict[str, Any]) -> list[Way]:
        condition = schema["if"]
        unmet = Way(
            (not condition if isinstance(condition, bool) else {"not": condition, AT: schema.get(AT, "")},)
        )
        yes = self._product(self.of(condition), self.of(schema.get("then", True)))
        return [*yes, *self._product([unmet], self.of(schema.get("else", True)))]

    def _dependent(self, schema: dict[str, Any]) -> list[Way]:
        ways = [Way()]
        at = schema.get(AT, "")
        for name, needed in schema["dependentSchemas"].items():
            absent = Way(({"properties": {name: False}, AT: at},))
            present = Way(({"type": "object", "required": [name], AT: at},))
            ways = self._product(ways, [absent, *self._product([present], self.of(needed))])
        return ways


def _own(schema: dict[str, Any]) -> Way:
    """What a schema evaluates by its own keywords."""
    return Way(
        (),
        dict.fromkeys(schema.get("properties", ())),
        dict.fromkeys(schema.get("patternProperties", ())),
        "additionalProperties" in schema or "unevaluatedProperties" in schema,
        len(schema.get("prefixItems", ())),
        "items" in schema or "unevaluatedItems" in schema,
        "contains" in schema,
    )


def unevaluated_properties(scene: Scene) -> list[Schema]:
    rest = scene.schema.pop("unevaluatedProperties")

    def close(way: Way) -> Schema:
        if way.all_properties or rest is True:
            return True
        closed: dict[str, Any] = {"additionalProperties": rest}
        if way.names:
            closed["properties"] = dict.fromkeys(way.names, True)
        if way.patterns:
            closed["patternProperties"] = dict.fromkeys(way.patterns, True)
        return scene.make(**closed)

    return _rewrite(scene, "unevaluatedProperties", rest, close)


def unevaluated_items(scene: Scene) -> list[Schema]:
    rest = scene.schema.pop("unevaluatedItems")

    def close(way: Way) -> Schema:
        if way.all_items or rest is True:
            return True
        if way.scattered:
            raise Unenforceable(
                "unevaluatedItems", scene.at, "masks cannot know which items contains has matched"
            )
        closed: dict[str, Any] = {"items": rest}
        if way.prefix:
            closed["prefixItems"] = [True] * way.prefix
        return scene.make(**closed)

    return _rewrite(scene, "unevaluatedItems", rest, close)


def _rewrite(scene: Scene, keyword: str, rest: Schema, close: Callable[[Way], Schema]) -> list[Schema]:
    if rest is True:
        return []
    ways = _Ways(scene, keyword).inside(scene.schema)
    if all(close(way) is True for way in ways):
        return []
    if any(other in scene.schema for other in _KEYWORDS):
        raise Unenforceable(keyword, scene.at, "unevaluatedItems stands beside it")
    for applicator in _APPLICATORS:
        scene.schema.pop(applicator, None)
    return [scene.union([scene.both(*way.schemas, close(way)) for way in ways])]
