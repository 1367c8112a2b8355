"""Can a value satisfy all of these schemas? Does one follow from the others?

Both answers are one-sided: ``unsatisfiable`` and ``implied`` say True only where that is proven, so that a
rewrite may rely on it. They take time polynomial in the schemas, and give up (False) when their steps run out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trellis.fsm.json_schema.facts import Facts
from trellis.fsm.json_schema.implications import ABOUT, RULES, same_companions
from trellis.fsm.json_schema.normalise import AT, Schema
from trellis.fsm.json_schema.regular import PatternAlgebra
from trellis.fsm.json_schema.validation import Validator
from trellis.fsm.json_schema.values import NUMBERS

_DEPTH = 8
_STEPS = 3_000


class _GaveUp(Exception):
    pass


class Relations:
    """definitions: what ``$ref`` leads to. algebra: compares patterns. tick: called at every step."""

    def __init__(
        self, definitions: dict[str, Schema], algebra: PatternAlgebra, tick: Callable[[], None]
    ) -> None:
        self.definitions = definitions
        self.algebra = algebra
        self._validator = Validator(definitions)
        self._tick = tick
        self._depth = 0
        self._steps = 0

    def facts(self, schemas: Sequence[Schema]) -> Facts:
        return Facts(schemas, self.definitions)

    def valid(self, value: Any, schema: Schema) -> bool:
        """Exact."""
        self._tick()
        return self._validator.is_valid(value, schema)

    def unsatisfiable(self, schemas: Sequence[Schema]) -> bool:
        return self._bounded(lambda: self.no_value(self.facts(schemas)))

    def implied(self, schemas: Sequence[Schema], conclusion: Schema) -> bool:
        """Does every value that satisfies the schemas satisfy the conclusion?"""
        return self._bounded(lambda: self.follows(self.facts(schemas), conclusion))

    def _bounded(self, question: Callable[[], bool]) -> bool:
        if self._depth == 0:
            self._steps = 0
        try:
            return question()
        except _GaveUp:
            if self._depth:
                raise
            return False

    def _within(self, question: Callable[[], bool]) -> bool:
        self._tick()
        self._steps += 1
        if self._steps > _STEPS:
            raise _GaveUp
        if self._depth >= _DEPTH:
            return False
        self._depth += 1
        try:
            return question()
        finally:
            self._depth -= 1

    # Unsatisfiable

    def no_value(self, facts: Facts) -> bool:
        """``unsatisfiable``, as part of a larger question."""
        return self._within(lambda: self._excluded(facts))

    def _excluded(self, facts: Facts) -> bool:
        if not facts.types:
            return True
        enums = list(facts.having("enum"))
        if enums:
            smallest = min(enums, key=len)
            return not any(all(self.valid(value, part) for part in facts.parts) for value in smallest)
        if self._contradicts_not(facts):
            return True
        if all(self._excluded_as(kind, facts) for kind in facts.types):
            return True
        return any(
            all(self.no_value(self.facts([*rest, branch])) for branch in branches)
            for branches, rest in _alternatives(facts)
        )

    def _contradicts_not(self, facts: Facts) -> bool:
        for part in facts.parts:
            if "not" in part:
                others = [_without(other, "not") if other is part else other for other in facts.parts]
                if part["not"] is True or self.follows(self.facts(others), part["not"]):
                    return True
        return False

    def _excluded_as(self, kind: str, facts: Facts) -> bool:
        if kind in NUMBERS:
            return _no_number(facts, kind)
        if kind == "string":
            if facts.most("minLength") > facts.least("maxLength"):
                return True
            patterns = list(dict.fromkeys(facts.having("pattern")))
            return len(patterns) > 1 and self.algebra.disjoint(patterns)
        if kind == "array":
            least = int(facts.most("minItems"))
            if least > facts.most_items:
                return True
            checked = min(least, facts.prefix + 1)
            return any(self.no_value(self.facts(facts.item(i))) for i in range(checked))
        if kind == "object":
            if max(len(facts.required), facts.most("minProperties")) > facts.least("maxProperties"):
                return True
            return any(self.no_value(self.facts(facts.member(name))) for name in facts.required)
        return False

    # Implied

    def follows(self, facts: Facts, conclusion: Schema) -> bool:
        """``implied``, as part of a larger question."""
        return self._within(lambda: self._decided(facts, conclusion))

    def _decided(self, facts: Facts, conclusion: Schema) -> bool:
        if conclusion is True or not facts.types:
            return True
        enums = list(facts.having("enum"))
        if enums and conclusion is not False:
            values = (v for v in min(enums, key=len) if all(self.valid(v, part) for part in facts.parts))
            return all(self.valid(value, conclusion) for value in values)
        if any(part is conclusion for part in facts.parts) or self.no_value(facts):
            return True
        if conclusion is False:
            return False
        if all(self._keyword_follows(facts, keyword, conclusion) for keyword in conclusion if keyword != AT):
            return True
        return any(
            all(self.follows(self.facts([*rest, branch]), conclusion) for branch in branches)
            for branches, rest in _alternatives(facts)
        )

    def keyword_implied(self, schemas: Sequence[Schema], keyword: str, schema: Schema) -> bool:
        """Does what this keyword of a schema says follow from the schemas?"""
        return self._bounded(lambda: self._keyword_follows(self.facts(schemas), keyword, schema))

    def _keyword_follows(self, facts: Facts, keyword: str, schema: dict[str, Any]) -> bool:
        value = schema[keyword]
        if any(part.get(keyword) == value and same_companions(part, schema, keyword) for part in facts.parts):
            return True
        kind = ABOUT.get(keyword)
        if kind is not None and not facts.types & kind:
            return True
        rule = RULES.get(keyword)
        return rule is not None and rule(self, facts, value, schema)


def _alternatives(facts: Facts) -> Iterator[tuple[list[Schema], list[Schema]]]:
    """Each list of which one must hold, with what holds besides: without alternatives, or this would not end."""
    rest = [_without(part, "anyOf", "oneOf", "allOf", "$ref") for part in facts.parts]
    for part in facts.parts:
        for keyword in ("anyOf", "oneOf"):
            if keyword in part:
                yield part[keyword], rest


def _without(part: dict[str, Any], *keywords: str) -> dict[str, Any]:
    return {keyword: value for keyword, value in part.items() if keyword not in keywords}


def _no_number(facts: Facts, kind: str) -> bool:
    low, high = facts.most("minimum", -math.inf), facts.least("maximum")
    above, below = facts.most("exclusiveMinimum", -math.inf), facts.least("exclusiveMaximum")
    if low > high or above >= high or low >= below or above >= below:
        return True
    if kind != "integer" or math.inf in (-max(low, above), min(high, below)):
        return False
    first = max(
        math.ceil(low) if low > -math.inf else -math.inf,
        math.floor(above) + 1 if above > -math.inf else -math.inf,
    )
    last = min(
        math.floor(high) if high < math.inf else math.inf,
        math.ceil(below) - 1 if below < math.inf else math.inf,
    )
    return first > last
