"""Rewrites of what counts or compares the items of an array."""

from __future__ import annotations

import math
from itertools import combinations, permutations
from typing import Any

from trellis.fsm.json_schema.errors import Unenforceable
from trellis.fsm.json_schema.normalise import Schema
from trellis.fsm.json_schema.scene import MOST_BRANCHES, Scene, more_combinations_than
from trellis.fsm.json_schema.values import EVERY_TYPE, freeze, names_of

_MOST_SEQUENCES = 2_000
_MOST_COMPARED = 12
_NO_ARRAY = names_of(EVERY_TYPE - {"array"})


def contains(scene: Scene) -> list[Schema]:
    """``contains`` with its bounds: spelled out over the positions of a short array."""
    schema = scene.schema["contains"]
    decided = scene.relations.keyword_implied(
        [*scene.given, {key: value for key, value in scene.known[-1].items() if "ontains" not in key}],
        "contains",
        scene.schema,
    )
    least, most = scene.schema.get("minContains", 1), scene.schema.get("maxContains", math.inf)
    for keyword in ("contains", "minContains", "maxContains"):
        scene.schema.pop(keyword, None)
    if decided or (least == 0 and most == math.inf):
        return []
    if schema is True:
        bounds = {"minItems": least} if most == math.inf else {"minItems": least, "maxItems": most}
        return [scene.make(**bounds)]
    if schema is False:
        return [scene.make(type=_NO_ARRAY)] if least else []
    if most == 0:
        return [scene.make(items=_not(scene, schema))] if least == 0 else [scene.make(type=_NO_ARRAY)]
    return [_spelled_out(scene, schema, least, most)]


def _not(scene: Scene, schema: Schema) -> Schema:
    return scene.make(**{"not": schema})


def _spelled_out(scene: Scene, schema: Schema, least: int, most: float) -> Schema:
    """Which positions hold a matching item; where there is an upper bound, the others do not."""
    length = scene.facts.most_items
    bounded = most < length
    sizes = range(least, int(most) + 1) if bounded else range(least, least + 1)
    if length > MOST_BRANCHES or more_combinations_than(MOST_BRANCHES, int(length), sizes):
        raise Unenforceable(
            "contains", scene.at, "it needs a small maxItems beside it, or items that all match"
        )
    ways: list[Schema] = []
    for size in sizes:
        for positions in combinations(range(int(length)), size):
            last = positions[-1] + 1 if positions else 0
            other = _not(scene, schema) if bounded else True
            prefix = [schema if i in positions else other for i in range(int(length) if bounded else last)]
            ways.append(scene.make(minItems=last, prefixItems=prefix))
    return scene.union(ways or [scene.make(type=_NO_ARRAY)])


def unique_items(scene: Scene) -> list[Schema]:
    """``uniqueItems``: implied, or a finite set of arrays."""
    if not scene.schema.pop("uniqueItems"):
        return []
    facts = scene.facts
    if facts.most_items <= 1 or "array" not in facts.types or _all_different(scene):
        return []
    arrays = scene.make(enum=_sequences(scene))
    return [arrays if facts.types == {"array"} else scene.union([scene.make(type=_NO_ARRAY), arrays])]


def _all_different(scene: Scene) -> bool:
    """No two positions can hold the same value."""
    facts = scene.facts
    if facts.most_items > _MOST_COMPARED:
        return False
    return all(
        scene.relations.unsatisfiable([*facts.item(i), *facts.item(j)])
        for i, j in combinations(range(int(facts.most_items)), 2)
    )


def _sequences(scene: Scene) -> list[list[Any]]:
    facts = scene.facts
    found = (value for i in range(facts.prefix + 1) for value in _values(scene, facts.item(i)))
    values = list({freeze(value): value for value in found}.values())
    longest = int(min(facts.most_items, len(values)))
    lengths = range(int(facts.most("minItems")), longest + 1)
    if lengths and not _few_sequences(len(values), lengths):
        raise Unenforceable(
            "uniqueItems", scene.at, "there are too many arrays of different items; lower maxItems"
        )
    return [
        list(sequence)
        for length in lengths
        for sequence in permutations(values, length)
        if all(scene.relations.valid(list(sequence), part) for part in scene.known)
    ]


def _few_sequences(of: int, lengths: range) -> bool:
    """Counts no further than the limit: the numbers are a client's."""
    total, count = 0, 1
    for length in range(lengths.stop):
        total += count if length in lengths else 0
        if max(total, count) > _MOST_SEQUENCES:
            return False
        count *= of - length
    return True


def _values(scene: Scene, schemas: list[Schema]) -> list[Any]:
    """All that an item may be."""
    facts = scene.relations.facts(schemas)
    enums = list(facts.having("enum"))
    if enums:
        candidates = min(enums, key=len)
    elif facts.types <= {"null", "boolean"}:
        candidates = [None, False, True]
    else:
        raise Unenforceable(
            "uniqueItems", scene.at, "masks cannot compare items; only small enums can be spelled out"
        )
    return [value for value in candidates if all(scene.relations.valid(value, schema) for schema in schemas)]
