"""What may be relied on in both directions.

Two schemas that hold for the same value may each be simplified by knowing the other, but not both by all of the
other: of two equal complements each would drop out for the sake of the other one. Keywords that are never
dropped, since masks enforce them as they are, may be known everywhere; the rest only in one direction.
"""

from __future__ import annotations

from typing import Any

from trellis.fsm.json_schema.normalise import Schema

_KEPT = {
    "$at", "$ref", "type", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "minLength", "maxLength", "pattern", "required", "minItems", "maxItems", "minProperties",
    "maxProperties",
}  # fmt: skip


def plain(schema: Schema) -> Schema:
    """A schema that follows from this one and holds only keywords that are enforced as they are."""
    if isinstance(schema, bool):
        return schema
    out: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _KEPT:
            out[keyword] = value
        elif keyword in ("properties", "patternProperties"):
            out[keyword] = {name: plain(inner) for name, inner in value.items()}
        elif keyword in ("allOf", "prefixItems"):
            out[keyword] = [plain(inner) for inner in value]
        elif keyword in ("additionalProperties", "items"):
            out[keyword] = plain(value)
    return out


def without_parts(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with what is only plain of its ``allOf``."""
    if "allOf" not in schema:
        return schema
    return {**schema, "allOf": [plain(part) for part in schema["allOf"]]}
