"""Rewrites of what is said about the names and the number of properties."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

from trellis.fsm.json_schema.anchors import NOTHING, without_inner_anchors
from trellis.fsm.json_schema.errors import Unenforceable
from trellis.fsm.json_schema.facts import Facts
from trellis.fsm.json_schema.normalise import Schema
from trellis.fsm.json_schema.patterns import exactly
from trellis.fsm.json_schema.regular import TooHard
from trellis.fsm.json_schema.scene import MOST_BRANCHES, Scene, more_combinations_than

_MOST_OVERLAPPING = 4


def property_names(scene: Scene) -> list[Schema]:
    """``propertyNames``: the named properties are judged now, the others by a pattern."""
    names = scene.schema.pop("propertyNames")
    if names is True:
        return []
    if names is False:
        return [scene.make(maxProperties=0)]
    facts = scene.facts
    bad = [name for name in facts.named if not scene.relations.valid(name, names)]
    found: list[Schema] = [scene.make(properties=dict.fromkeys(bad, False))] if bad else []
    if facts.closed:
        return found
    patterns = _name_patterns(scene, names)
    try:
        _confine(scene, patterns)
        return found
    except TooHard:
        return [scene.make(patternProperties={name: True}, additionalProperties=False) for name in patterns]


def _name_patterns(scene: Scene, names: Schema) -> list[str]:
    """Patterns that a string matches exactly if it satisfies the schema."""
    facts = scene.relations.facts([names])
    patterns: list[str] = []
    for part in facts.parts:
        for keyword, value in part.items():
            if keyword == "pattern":
                patterns.append(value)
            elif keyword == "enum":
                patterns.append(exactly([text for text in value if isinstance(text, str)]))
            elif keyword in ("minLength", "maxLength"):
                bounds = f"{value}," if keyword == "minLength" else f"0,{value}"
                patterns.append(rf"^(?s:.){{{bounds}}}\Z")
            elif keyword not in ("$at", "type", "allOf", "$ref"):
                raise Unenforceable(
                    "propertyNames", scene.at, f"{keyword!r} inside it cannot be made a pattern"
                )
    return patterns if "string" in facts.types else [NOTHING]


def _confine(scene: Scene, patterns: list[str]) -> None:
    """All names must match the patterns; what is said about them besides goes on to hold. Raises TooHard."""
    rest = scene.schema.get("additionalProperties", True)
    listed = scene.schema.get("patternProperties", {})
    confined: dict[str, Schema] = {}
    for pattern, schema in listed.items():
        narrowed = _narrowed(scene, [pattern, *patterns], [])
        if narrowed is not None:
            confined[narrowed] = scene.both(confined.get(narrowed, True), schema)
    if rest is not False:
        named = list(scene.schema.get("properties", ())) if rest is not True else []
        others = _narrowed(scene, patterns, [*listed, exactly(named)] if named else list(listed))
        if others is not None:
            confined[others] = scene.both(confined.get(others, True), rest)
    scene.schema["patternProperties"] = confined
    scene.schema["additionalProperties"] = False


def _narrowed(scene: Scene, patterns: list[str], without: list[str]) -> str | None:
    if len(patterns) == 1 and not without:
        return patterns[0]
    return scene.relations.algebra.difference(patterns, without)


def pattern_properties(scene: Scene) -> list[Schema]:
    """Patterns for a few names become these names; ones that overlap are cut into ones that do not.

    A pattern of which all texts are named elsewhere would lead the engine into a dead end: it allows one more
    property, and then no name for it.
    """
    others = {pattern for part in scene.facts.parts for pattern in part.get("patternProperties", {})}
    mine: dict[str, Schema] = {}
    for pattern, schema in _name(scene).items():
        spelled = without_inner_anchors(pattern, scene, "patternProperties")
        mine[spelled] = scene.both(mine.get(spelled, True), schema)
    scene.schema["patternProperties"] = mine
    ordered = sorted({without_inner_anchors(p, scene, "patternProperties") for p in others} | set(mine))
    algebra = scene.relations.algebra
    cut: dict[str, Schema] = {}
    for pattern, schema in mine.items():
        overlapping = [
            other for other in ordered if other != pattern and not algebra.disjoint([pattern, other])
        ]
        if not overlapping:
            cut[pattern] = schema
            continue
        if len(overlapping) > _MOST_OVERLAPPING:
            raise Unenforceable("patternProperties", scene.at, "too many of its patterns overlap")
        _cut(scene, pattern, overlapping, cut)
    scene.schema["patternProperties"] = cut
    if not cut:
        del scene.schema["patternProperties"]
    return []


def _name(scene: Scene) -> dict[str, Schema]:
    """Name the texts of small patterns; returns the other patterns."""
    others: dict[str, Schema] = {}
    named = dict(scene.schema.get("properties", {}))
    for pattern, schema in scene.schema["patternProperties"].items():
        texts = scene.relations.algebra.texts(pattern, MOST_BRANCHES)
        if texts is None:
            others[pattern] = schema
        for text in texts or ():
            named[text] = scene.both(named.get(text, True), schema)
    if named:
        scene.schema["properties"] = named
    return others


def _cut(scene: Scene, pattern: str, overlapping: list[str], cut: dict[str, Schema]) -> None:
    """The parts of a pattern by which of the others match, too."""
    mine = scene.schema["patternProperties"]
    for size in range(len(overlapping) + 1):
        for also in combinations(overlapping, size):
            inside = sorted([pattern, *also])
            outside = [other for other in overlapping if other not in also]
            try:
                part = scene.relations.algebra.difference(inside, outside)
            except TooHard:
                reason = "its patterns overlap, and are too large to be taken apart"
                raise Unenforceable("patternProperties", scene.at, reason) from None
            if part is not None:
                cut[part] = scene.both(*(mine[other] for other in inside if other in mine))


def count_properties(scene: Scene) -> list[Schema]:
    """``minProperties`` and ``maxProperties``: spelled out over which optional properties are there.

    Properties that have no name in the schema are counted by the grammar itself, but it cannot see that the
    same name comes twice: of those no more than one may be asked for.
    """
    facts = scene.facts
    least = int(facts.most("minProperties"))
    most = facts.least("maxProperties")
    optional = [name for name in facts.named if name not in facts.required and not facts.forbids(name)]
    needed, room = least - len(facts.required), most - len(facts.required)
    if facts.closed:
        room = math.inf if room >= len(optional) else room
    if "object" not in facts.types or (needed <= 0 and room == math.inf):
        _forget(scene)
        return []
    if not optional and not facts.closed:
        return _counted_by_grammar(scene, needed)
    if facts.closed and room == math.inf:
        ways = _first_present(scene, optional, needed)
    elif room == math.inf and needed == 1:
        none = scene.make(properties=dict.fromkeys(optional, False), minProperties=least)
        ways = [*_first_present(scene, optional, 1), none]
    else:
        ways = _subsets(scene, facts, optional, least, most)
    _forget(scene)
    return [scene.union(ways)]


def _forget(scene: Scene) -> None:
    scene.schema.pop("minProperties", None)
    scene.schema.pop("maxProperties", None)


def _counted_by_grammar(scene: Scene, needed: int) -> list[Schema]:
    if needed <= 0:
        scene.schema.pop("minProperties", None)
    elif needed > 1:
        reason = "the names of two more properties would have to differ; name them under properties"
        raise Unenforceable("minProperties", scene.at, reason)
    return []


def _check_branches(scene: Scene, of: int, sizes: range) -> None:
    if more_combinations_than(MOST_BRANCHES, of, sizes):
        keyword = "minProperties" if "minProperties" in scene.schema else "maxProperties"
        raise Unenforceable(keyword, scene.at, f"it leaves more than {MOST_BRANCHES} choices of properties")


def _first_present(scene: Scene, optional: list[str], needed: int) -> list[Schema]:
    """By which are the first so many that are there; those before them, between, are not."""
    _check_branches(scene, len(optional), range(needed, needed + 1))
    ways: list[Schema] = []
    for present in combinations(range(len(optional)), needed):
        absent = [optional[i] for i in range(present[-1]) if i not in present]
        chosen: dict[str, Any] = {"required": [optional[i] for i in present]}
        if absent:
            chosen["properties"] = dict.fromkeys(absent, False)
        ways.append(scene.make(type="object", **chosen))
    return [*ways, *_no_object(scene)]


def _subsets(scene: Scene, facts: Facts, optional: list[str], least: int, most: float) -> list[Schema]:
    """By exactly which optional properties are there."""
    room = int(min(most - len(facts.required), len(optional)))
    sizes = range(room + 1)
    _check_branches(scene, len(optional), sizes)
    ways: list[Schema] = []
    for size in sizes:
        missing = least - len(facts.required) - size
        if facts.closed and missing > 0:
            continue
        bounds: dict[str, Any] = {}
        if not facts.closed and missing > 0:
            bounds["minProperties"] = least
        if not facts.closed and most < math.inf:
            bounds["maxProperties"] = int(most)
        for present in combinations(optional, size):
            absent = dict.fromkeys((name for name in optional if name not in present), False)
            ways.append(scene.make(type="object", required=list(present), properties=absent, **bounds))
    return [*ways, *_no_object(scene)]


def _no_object(scene: Scene) -> list[Schema]:
    types = [name for name in ("null", "boolean", "number", "string", "array") if _allows(scene.facts, name)]
    return [scene.make(type=types)] if types else []


def _allows(facts: Facts, name: str) -> bool:
    return bool(facts.types & {"number": {"integer", "fraction"}}.get(name, {name}))
