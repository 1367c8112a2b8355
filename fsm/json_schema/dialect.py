"""The drafts of JSON schema: which keywords are in effect, and what they mean there."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

_DRAFT_4: frozenset[str] = frozenset({
    "$ref", "type", "enum", "allOf", "anyOf", "oneOf", "not", "multipleOf", "maximum", "exclusiveMaximum",
    "minimum", "exclusiveMinimum", "maxLength", "minLength", "pattern", "format", "items",
    "additionalItems", "maxItems", "minItems", "uniqueItems", "maxProperties", "minProperties", "required",
    "properties", "patternProperties", "additionalProperties", "dependencies",
})  # fmt: skip
_DRAFT_6 = _DRAFT_4 | {"const", "contains", "propertyNames"}
_DRAFT_7 = _DRAFT_6 | {"if", "then", "else"}
# Since 2019-09 ``format`` says something about a string only to those who ask; it asserts nothing.
_DRAFT_2019 = (_DRAFT_7 - {"dependencies", "format"}) | {
    "dependentRequired", "dependentSchemas", "minContains", "maxContains", "unevaluatedItems",
    "unevaluatedProperties", "$recursiveRef",
}  # fmt: skip
_DRAFT_2020 = (_DRAFT_2019 - {"additionalItems", "$recursiveRef"}) | {"prefixItems", "$dynamicRef"}
ASSERTIONS = _DRAFT_7 | _DRAFT_2019 | _DRAFT_2020

ANNOTATIONS: Set[str] = {
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment",
    "$defs", "definitions", "title", "description", "default", "examples", "example", "readOnly",
    "writeOnly", "deprecated", "contentMediaType", "contentEncoding", "contentSchema",
}  # fmt: skip

# Where a keyword holds schemas. ``items`` and ``dependencies`` may hold other things, too.
ONE_SCHEMA: Set[str] = {
    "items", "additionalItems", "contains", "not", "if", "then", "else", "additionalProperties",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties", "contentSchema",
}  # fmt: skip
LIST_OF_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
MAP_OF_SCHEMAS: Set[str] = {
    "properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies",
}  # fmt: skip


@dataclass(frozen=True)
class Dialect:
    """keywords: those that assert something.

    ref_stands_alone: what stands beside ``$ref`` is ignored. id_keyword: names a schema resource.
    """

    name: str
    keywords: Set[str]
    ref_stands_alone: bool
    id_keyword: str = "$id"


# A schema that names no draft is read as people write them: every keyword of every draft holds.
UNNAMED = Dialect("no draft named", ASSERTIONS, ref_stands_alone=False)
_DIALECTS = {
    "json-schema.org/draft-04/schema": Dialect("draft-04", _DRAFT_4, True, "id"),
    "json-schema.org/draft-06/schema": Dialect("draft-06", _DRAFT_6, True),
    "json-schema.org/draft-07/schema": Dialect("draft-07", _DRAFT_7, True),
    "json-schema.org/draft/2019-09/schema": Dialect("2019-09", _DRAFT_2019, False),
    "json-schema.org/draft/2020-12/schema": Dialect("2020-12", _DRAFT_2020, False),
    "json-schema.org/schema": UNNAMED,
}


def dialect_named(uri: str) -> Dialect | None:
    """The dialect of a ``$schema``; None if it is none of these."""
    return _DIALECTS.get(uri.rstrip("#").removeprefix("https://").removeprefix("http://"))
