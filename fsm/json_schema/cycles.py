"""References that lead back to themselves without reading anything of the value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trellis.fsm.json_schema.errors import malformed
from trellis.fsm.json_schema.normalise import AT, DEFS, Schema

_LISTS = ("allOf", "anyOf", "oneOf")
_SINGLE = ("not", "if", "then", "else")


def check_cycles(definitions: dict[str, Schema]) -> None:
    """ConstraintError ``syntax`` if deciding about a value would never end."""
    done: set[str] = set()
    for start in definitions:
        path: dict[str, None] = {}
        pending: list[tuple[str, bool]] = [(start, True)]
        while pending:
            name, entering = pending.pop()
            if not entering:
                del path[name]
                done.add(name)
            elif name in path:
                where = _where(definitions[name])
                raise malformed(
                    where, "the $ref leads back to itself without a property or an item in between"
                )
            elif name not in done:
                path[name] = None
                pending.append((name, False))
                pending.extend((target, True) for target in _in_place(definitions[name]))


def _where(schema: Schema) -> str:
    return schema.get(AT, "") if isinstance(schema, dict) else ""


def _in_place(schema: Schema) -> Iterator[str]:
    """Definitions that apply to the same value."""
    pending: list[Any] = [schema]
    while pending:
        item = pending.pop()
        if not isinstance(item, dict):
            continue
        if "$ref" in item:
            yield item["$ref"].removeprefix(DEFS)
        for keyword in _LISTS:
            pending.extend(item.get(keyword, ()))
        pending.extend(item[keyword] for keyword in _SINGLE if keyword in item)
        pending.extend(item.get("dependentSchemas", {}).values())
