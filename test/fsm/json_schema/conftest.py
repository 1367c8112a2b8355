"""Random schemas and values over a small world, in which rules meet and instances are often valid."""

from __future__ import annotations

import json
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import strategies as st

NAMES = ["a", "b", "c"]
PATTERNS = ["^a", "b$", "^[ab]+$", "a", "^$", "^(ab|c)$", "a|^b", "^(?:a|b$)", r"^\S+$"]
SCALARS: list[Any] = [None, True, False, 0, 1, 2, 1.5, "", "a", "ab", "c", "bb"]

scalars = st.sampled_from(SCALARS)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*NAMES, "ab", "d"]), inner, max_size=3)
    ),
    max_leaves=6,
)
types = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
counts = st.integers(0, 3)


def _plain(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    named = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    return {
        "type": types | st.lists(types, min_size=1, max_size=3, unique=True),
        "enum": st.lists(values, min_size=1, max_size=3),
        "const": values,
        "minimum": st.integers(-1, 2),
        "maximum": st.integers(0, 3),
        "exclusiveMinimum": st.integers(-1, 2),
        "minLength": counts,
        "maxLength": counts,
        "pattern": st.sampled_from(PATTERNS),
        "properties": named,
        "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        "additionalProperties": inner,
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "minItems": counts,
        "maxItems": counts,
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "allOf": st.lists(inner, min_size=1, max_size=2),
    }


def _logic(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    needs = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)
    return {
        "not": inner,
        "oneOf": st.lists(inner, min_size=1, max_size=3),
        "if": inner,
        "then": inner,
        "else": inner,
        "dependentRequired": st.dictionaries(st.sampled_from(NAMES), needs, min_size=1, max_size=2),
        "dependentSchemas": st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=2),
        "propertyNames": st.sampled_from(
            [
                {"pattern": "^a"},
                {"enum": ["a", "b"]},
                {"maxLength": 1},
                {"minLength": 1},
                {"minLength": 1, "pattern": "b$"},
                False,
            ]
        ),
        "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), inner, min_size=1, max_size=2),
        "minProperties": counts,
        "maxProperties": counts,
        "contains": inner,
        "minContains": counts,
        "maxContains": counts,
        "uniqueItems": st.booleans(),
        "unevaluatedProperties": inner,
        "unevaluatedItems": inner,
    }


def _one(
    keywords: dict[str, st.SearchStrategy[Any]], optional: int, must: str | None = None
) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(sorted(keywords)), max_size=optional, unique=True)
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries(
            {name: keywords[name] for name in sorted({*chosen, *([must] if must else [])})}
        )
    )


def plain_schemas(leaves: int = 4) -> st.SearchStrategy[Any]:
    """Only keywords that masks enforce as they are."""
    return st.recursive(
        st.booleans() | _one({"type": types, "const": values}, 1),
        lambda s: _one(_plain(s), 3),
        max_leaves=leaves,
    )


def schemas(leaves: int = 5) -> st.SearchStrategy[Any]:
    """Keywords of all kinds, inside each other."""
    leaf = st.booleans() | _one({"type": types, "enum": st.lists(scalars, min_size=1, max_size=3)}, 1)
    return st.recursive(leaf, lambda inner: _one({**_plain(inner), **_logic(inner)}, 4), max_leaves=leaves)


def schemas_with(keyword: str) -> st.SearchStrategy[Any]:
    """The keyword among plain ones, its own schemas plain."""
    inner = plain_schemas(3)
    keywords = {**_plain(inner), keyword: _logic(inner)[keyword]}
    return _one(keywords, 3, must=keyword)


def schemas_with_references() -> st.SearchStrategy[Any]:
    """A document with two definitions that may refer to each other, below properties and items or beside."""
    reference = st.sampled_from([{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}, {"$ref": "#"}])
    leaf = (
        reference
        | st.booleans()
        | _one({"type": types, "enum": st.lists(scalars, min_size=1, max_size=3)}, 1)
    )
    inner = st.recursive(
        leaf, lambda s: _one({**_plain(s), **_logic(s), "$ref": st.just("#/$defs/x")}, 3), max_leaves=3
    )
    return st.builds(
        lambda root, x, y: {**(root if isinstance(root, dict) else {}), "$defs": {"x": x, "y": y}},
        inner,
        inner,
        inner,
    )


def old_schemas(draft: int) -> st.SearchStrategy[Any]:
    """Schemas of draft 4 to 7 with the keywords that have changed since."""

    def keywords(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
        names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)
        made: dict[str, st.SearchStrategy[Any]] = {
            "type": types,
            "items": inner | st.lists(inner, min_size=1, max_size=2),
            "additionalItems": inner if draft > 4 else inner.filter(lambda s: s is not True),
            "dependencies": st.dictionaries(st.sampled_from(NAMES), names | inner, min_size=1, max_size=2),
            "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
            "minimum": st.integers(0, 2),
            "$ref": st.just("#/definitions/x"),
            "const": scalars,
            "if": inner,
            "then": inner,
        }
        if draft == 4:
            made["exclusiveMinimum"] = st.booleans()
        return made

    leaf = _one({"type": types, "enum": st.lists(scalars, min_size=1, max_size=3)}, 2)
    inner = st.recursive(leaf, lambda s: _one(keywords(s), 3), max_leaves=4)
    return inner.map(
        lambda s: {
            **s,
            "$schema": f"http://json-schema.org/draft-0{draft}/schema#",
            "definitions": {"x": {"type": ["string", "integer", "object"]}},
        }
    )


def spellings(value: Any) -> list[str]:
    """Texts of a value: its members in every order. Only for small values."""
    if isinstance(value, dict):
        texts = []
        for order in permutations(value):
            members = [[f"{json.dumps(name)}: {text}" for text in spellings(value[name])] for name in order]
            texts += ["{" + ", ".join(chosen) + "}" for chosen in product(*members)]
        return texts
    if isinstance(value, list):
        return ["[" + ", ".join(chosen) + "]" for chosen in product(*map(spellings, value))]
    return [json.dumps(value, ensure_ascii=False)]


class World:
    """What the property tests draw from."""

    values = values
    schemas = staticmethod(schemas)
    schemas_with = staticmethod(schemas_with)
    plain_schemas = staticmethod(plain_schemas)
    schemas_with_references = staticmethod(schemas_with_references)
    old_schemas = staticmethod(old_schemas)
    spellings = staticmethod(spellings)


@pytest.fixture(scope="session")
def world() -> World:
    return World()
