"""Schemas that only an endless value could satisfy: found by a least fixed point, and replaced by ``false``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trellis.fsm.json_schema.facts import Facts
from trellis.fsm.json_schema.normalise import DEFS, Schema


def drop_endless(root: Schema, definitions: dict[str, Schema], tick: Callable[[], None]) -> Schema:
    """The root, with definitions changed in place so that each of them has a finite value.

    tick: called for every definition that is looked at. The last come first, as they were made for those before.
    """
    finite: set[str] = set()
    before = -1
    while len(finite) > before:
        before = len(finite)
        for name in reversed(definitions):
            tick()
            if name not in finite and _finite([definitions[name]], finite):
                finite.add(name)
    for name in definitions.keys() - finite:
        definitions[name] = False
    return root if _finite([root], finite) else False


def _finite(schemas: Sequence[Schema], finite: set[str]) -> bool:
    """Has their conjunction a value, if exactly the references in ``finite`` have? Looks for endless ones only."""
    facts = Facts(schemas, {})
    if facts.impossible or not all(name.removeprefix(DEFS) in finite for name in facts.having("$ref")):
        return False
    if not facts.types:
        return False
    plain = [
        {key: value for key, value in part.items() if key not in ("anyOf", "allOf")} for part in facts.parts
    ]
    for branches in facts.having("anyOf"):
        if not any(_finite([*plain, branch], finite) for branch in branches):
            return False
    if facts.holds("enum") or facts.types - {"object", "array"}:
        return True
    return ("object" in facts.types and _finite_object(facts, finite)) or (
        "array" in facts.types and _finite_array(facts, finite)
    )


def _finite_object(facts: Facts, finite: set[str]) -> bool:
    if not all(_finite(facts.member(name), finite) for name in facts.required):
        return False
    least = facts.most("minProperties")
    if least <= len(facts.required):
        return True
    free = [part.get("additionalProperties", True) for part in facts.parts]
    if _finite(free, finite) or facts.holds("patternProperties"):
        return True
    return sum(_finite(facts.member(name), finite) for name in facts.named) >= least


def _finite_array(facts: Facts, finite: set[str]) -> bool:
    least = min(int(facts.most("minItems")), facts.prefix + 1)
    return all(_finite(facts.item(i), finite) for i in range(least))
