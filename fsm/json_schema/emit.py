"""The lowered schema in the form that llguidance reads."""

from __future__ import annotations

from typing import Any

from trellis.fsm.json_schema.normalise import AT, DEFS, Schema
from trellis.fsm.json_schema.patterns import for_llguidance

# llguidance takes what stands before one of these for one schema, and what stands behind it for another. So
# they come last: ``additionalProperties`` has to be read along with ``properties``.
_COMBINED = frozenset({"$ref", "anyOf", "allOf"})


def emit(root: Schema, definitions: dict[str, Schema]) -> dict[str, Any] | bool:
    """Only definitions that are used are written. What nothing satisfies is ``False`` there (``drop_endless``)."""
    used: list[str] = []
    false = {name for name, schema in definitions.items() if schema is False}
    top = _emit(root, used, false)
    written: dict[str, Any] = {}
    while used:
        name = used.pop()
        if name not in written:
            written[name] = _emit(definitions[name], used, false)
    return {**top, "$defs": written} if written else top


def _emit(schema: Schema, used: list[str], false: set[str]) -> Any:
    """used: receives the names of the definitions referred to. false: names of those without a value."""
    if isinstance(schema, bool):
        return schema
    if schema.get("$ref", "").removeprefix(DEFS) in false:
        return False
    out: dict[str, Any] = {}
    for keyword, value in sorted(schema.items(), key=lambda item: item[0] in _COMBINED):
        if keyword == AT:
            continue
        if keyword == "$ref":
            used.append(value.removeprefix(DEFS))
        elif keyword == "properties":
            value = {name: _emit(inner, used, false) for name, inner in value.items()}
        elif keyword in ("allOf", "anyOf", "prefixItems"):
            value = [_emit(inner, used, false) for inner in value]
            if keyword == "anyOf":
                value = [inner for inner in value if inner is not False]
            if (keyword == "anyOf" and not value) or (
                keyword == "allOf" and any(inner is False for inner in value)
            ):
                return False
        elif keyword in ("items", "additionalProperties"):
            value = _emit(value, used, false)
        elif keyword == "patternProperties":
            value = {for_llguidance(pattern): _emit(inner, used, false) for pattern, inner in value.items()}
        elif keyword == "pattern":
            value = for_llguidance(value)
        out[keyword] = value
    return out
