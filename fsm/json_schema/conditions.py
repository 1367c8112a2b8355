"""Rewrites of what depends on a condition: ``if``, ``not``, ``oneOf`` and the two kinds of dependencies."""

from __future__ import annotations

from typing import Any

from trellis.fsm.json_schema.errors import Unenforceable
from trellis.fsm.json_schema.negate import MOST_COMPARED, negate
from trellis.fsm.json_schema.normalise import Schema
from trellis.fsm.json_schema.relations import Relations
from trellis.fsm.json_schema.scene import Scene
from trellis.fsm.json_schema.values import freeze


def complement(scene: Scene) -> list[Schema]:
    """``not``"""
    schema = scene.schema.pop("not")
    return [negate(schema, scene.known, scene.relations)]


def conditional(scene: Scene) -> list[Schema]:
    """``if`` with ``then`` and ``else``: (if and then) or (not if and else)."""
    condition = scene.schema.pop("if")
    yes, no = scene.schema.pop("then", True), scene.schema.pop("else", True)
    if (yes is True and no is True) or scene.relations.implied(scene.known, condition):
        return [yes]
    if scene.relations.unsatisfiable([*scene.known, condition]):
        return [no]
    otherwise = scene.both(negate(condition, scene.known, scene.relations), no)
    return [scene.union([scene.both(condition, yes), otherwise])]


def dependent_required(scene: Scene) -> list[Schema]:
    """Each: the property is absent, or what it needs is there, too."""
    facts = scene.facts
    found: list[Schema] = []
    for name, needs in scene.schema.pop("dependentRequired").items():
        missing = [need for need in needs if need not in facts.required and need != name]
        if not missing or facts.forbids(name):
            continue
        present = scene.make(required=[*missing, name])
        absent = scene.make(properties={name: False})
        found.append(present if name in facts.required else scene.union([absent, present]))
    return found


def dependent_schemas(scene: Scene) -> list[Schema]:
    """Each: the property is absent, or the schema holds."""
    facts = scene.facts
    found: list[Schema] = []
    for name, schema in scene.schema.pop("dependentSchemas").items():
        if facts.forbids(name):
            continue
        absent = scene.make(properties={name: False})
        if name in facts.required and facts.types == {"object"}:
            found.append(schema)
        else:
            found.append(
                scene.union([absent, scene.both(scene.make(type="object", required=[name]), schema)])
            )
    return found


def exactly_one(scene: Scene) -> list[Schema]:
    """``oneOf``: a union, once each alternative excludes those that it may overlap with."""
    alternatives = scene.schema.pop("oneOf")
    if told_apart(alternatives, scene.relations):
        return [scene.union(alternatives)]
    if len(alternatives) > MOST_COMPARED:
        reason = f"more than {MOST_COMPARED} alternatives have no property of constants to tell them apart"
        raise Unenforceable("oneOf", scene.at, reason, [scene.union(alternatives)])
    possible = [one for one in alternatives if not scene.relations.unsatisfiable([*scene.known, one])]
    return [scene.union([_alone(scene, possible, i) for i in range(len(possible))])]


def _alone(scene: Scene, possible: list[Schema], i: int) -> Schema:
    """An alternative without those that may hold together with it."""
    context = [*scene.known, possible[i]]
    excluded: list[Schema] = []
    for j, other in enumerate(possible):
        if i != j and not scene.relations.unsatisfiable([*context, other]):
            try:
                excluded.append(negate(other, context, scene.relations))
            except Unenforceable as refusal:
                reason = f"alternatives {i} and {j} may hold together; {refusal.reason}"
                raise Unenforceable("oneOf", scene.at, reason, [scene.union(possible)]) from None
    return scene.both(possible[i], *excluded)


def told_apart(alternatives: list[Schema], relations: Relations) -> bool:
    """Do constants exclude each other, of the alternatives or of a property that all of them require?

    The common case, in time linear in the alternatives; False where it takes a closer look.
    """
    known = [relations.facts([one]) for one in alternatives]
    if _different_constants([list(facts.having("enum")) for facts in known]):
        return True
    shared = set.intersection(*(set(facts.required) for facts in known)) if known else set()
    if any(facts.types != {"object"} for facts in known):
        return False
    return any(
        _different_constants([list(relations.facts(facts.member(name)).having("enum")) for facts in known])
        for name in shared
    )


def _different_constants(enums: list[list[list[Any]]]) -> bool:
    """enums: for each alternative the lists of constants that it allows."""
    seen: set[Any] = set()
    for found in enums:
        if not found:
            return False
        values = {freeze(value) for value in min(found, key=len)}
        if values & seen:
            return False
        seen |= values
    return True
