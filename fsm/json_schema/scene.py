"""What a rewrite sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trellis.fsm.json_schema.facts import Facts
from trellis.fsm.json_schema.normalise import AT, Schema
from trellis.fsm.json_schema.plain import without_parts
from trellis.fsm.json_schema.relations import Relations

MOST_BRANCHES = 256


def more_combinations_than(most: int, of: int, sizes: Iterable[int]) -> bool:
    """Are there more ways to choose so many out of so many? Stops counting there: the numbers are a client's."""
    total = 0
    for size in sizes:
        total += _combinations(of, size, most)
        if total > most:
            return True
    return False


def _combinations(of: int, size: int, most: int) -> int:
    """The binomial coefficient, or some number above ``most``."""
    count = 1 if 0 <= size <= of else 0
    for i in range(min(size, of - size)):
        count = count * (of - i) // (i + 1)
        if count > most:
            break
    return count


@dataclass
class Scene:
    """schema: being rewritten, in place. given: what holds for the same value besides. warn: tells the user."""

    schema: dict[str, Any]
    given: Sequence[Schema]
    relations: Relations
    warn: Callable[[str], None]

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
