"""What a rewrite sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trellis.fsm.json_schema.facts import Facts
from trellis.fsm.json_schema.normalise import AT, Schema
from trellis.fsm.json_schema.plain import without_parts
from trellis.fsm.json_schema.relations import Relations

MOST_BRANCHES = 256


@dataclass
class Scene:
    """schema: being rewritten, in place. given: what holds for the same value besides."""

    schema: dict[str, Any]
    given: Sequence[Schema]
    relations: Relations

    @property
    def at(self) -> str:
        return str(self.schema.get(AT, ""))

    @property
    def known(self) -> list[Schema]:
        """What holds here: of ``allOf`` only what is plain, since its parts are lowered knowing this schema."""
        return [*self.given, without_parts(self.schema)]

    @property
    def facts(self) -> Facts:
        return self.relations.facts(self.known)

    def union(self, ways: list[Schema]) -> Schema:
        if any(way is True for way in ways):
            return True
        ways = [way for way in ways if way is not False]
        if len(ways) == 1:
            return ways[0]
        return {"anyOf": ways, AT: self.at} if ways else False

    def both(self, *schemas: Schema) -> Schema:
        if any(schema is False for schema in schemas):
            return False
        parts = [schema for schema in schemas if schema is not True]
        if len(parts) == 1:
            return parts[0]
        return {"allOf": parts, AT: self.at} if parts else True

    def make(self, **keywords: Any) -> dict[str, Any]:
        return {**keywords, AT: self.at}
