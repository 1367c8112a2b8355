"""The check of a finished text gives the answer of the ``jsonschema`` library, whatever draft and keyword."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
from collections.abc import Callable, Iterator
from decimal import Context, Decimal
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import validators
from referencing.exceptions import Unresolvable

from trellis.errors import ConstraintError
from trellis.fsm.json_schema.cycles import check_cycles
from trellis.fsm.json_schema.document import Document
from trellis.fsm.json_schema.formats import format_schema
from trellis.fsm.json_schema.matching import matches
from trellis.fsm.json_schema.normalise import normalise
from trellis.fsm.json_schema.source import read_schema
from trellis.fsm.json_schema.validation import text_check
from trellis.fsm.limits import Limits

DRAFTS = {
    "draft-04": "http://json-schema.org/draft-04/schema#",
    "draft-06": "http://json-schema.org/draft-06/schema#",
    "draft-07": "http://json-schema.org/draft-07/schema#",
    "2019-09": "https://json-schema.org/draft/2019-09/schema",
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
}
_NAMES = ["a", "b", "c", "ab", "$ref", "é"]
_PATTERNS = ["^a", "b$", "^[ab]+$", "a|^c", "^$", "(ab|c)$", "^.{1,2}$", r"^[a-zé]*$", r"[^a-b]"]
_NUMBERS: list[Any] = [
    0, 1, 2, 3, -1, 1.0, 1.5, 0.1, 0.3, 0.0, -0.0, 1e20, 10**20, 2**53, 2**53 + 1, 2.0**53, 1e-7, 4.35, -2.5, 10**40,
]  # fmt: skip
_DIVISORS = [1, 2, 3, 0.1, 0.01, 0.5, 1.5, 1e-7, 10**15, 0.3, 2.0]
_TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
_SINCE = {name: number for number, name in enumerate(DRAFTS)}


def value(random: Random, depth: int = 3) -> Any:
    kind = random.randrange(8 if depth else 5)
    if kind < 2:
        return random.choice(_NUMBERS)
    if kind == 2:
        return random.choice([None, True, False])
    if kind < 5:
        return random.choice(["", "a", "b", "ab", "c", "cc", "1", "é", "😀", "a b", "abc"])
    if kind < 6 or random.random() < 0.3:
        return [value(random, depth - 1) for _ in range(random.randrange(4))]
    return {random.choice(_NAMES): value(random, depth - 1) for _ in range(random.randrange(4))}


class Documents:
    """draft: a name of ``DRAFTS``. Schemas are drawn for that draft, with all its keywords."""

    def __init__(self, random: Random, draft: str) -> None:
        self._random = random
        self._draft = draft
        self._since = _SINCE[draft]
        self._defs = "$defs" if self._since >= 3 else "definitions"

    def document(self) -> dict[str, Any]:
        root = self._object(3)
        root["$schema"] = DRAFTS[self._draft]
        root[self._defs] = {"x": self.schema(2), "y": self.schema(2)}
        if self._since >= 3:
            self._resources(root)
        return root

    def _resources(self, root: dict[str, Any]) -> None:
        """Resources that override each other's dynamic anchors."""
        if self._random.random() < 0.5:
            root["$id"] = "https://example.com/root"
            tree = {"$id": "tree", **self._object(1), **self._recursive_anchor()}
            tree["properties"] = {"a": self._dynamic(), "b": self.schema(1)}
            root[self._defs]["tree"] = tree
            if self._random.random() < 0.6:
                root["$ref"] = "tree"
            if self._random.random() < 0.6:
                root.update(self._recursive_anchor())

    def _recursive_anchor(self) -> dict[str, Any]:
        if self._random.random() < 0.3:
            return {}
        return (
            {"$dynamicAnchor": "node"}
            if self._since == 4
            else {"$recursiveAnchor": self._random.random() < 0.8}
        )

    def _dynamic(self) -> dict[str, Any]:
        if self._since == 4:
            return self._random.choice(
                [{"$ref": "tree"}, {"$dynamicRef": "tree#/properties/b"}, {"$dynamicRef": "#node"}]
            )
        return {"$recursiveRef": "#"}

    def schema(self, depth: int) -> Any:
        if self._since and self._random.random() < 0.12:
            return self._random.random() < 0.7
        return self._object(depth)

    def _object(self, depth: int) -> dict[str, Any]:
        """References lead inwards only where no loop can come of it: below ``properties`` and ``items``."""
        rules = [*self._plain(), *(self._inside(depth - 1) if depth > 0 else [])]
        made: dict[str, Any] = {}
        for _ in range(self._random.randrange(1, 5)):
            made.update(self._random.choice(rules)())
        return made

    def _plain(self) -> list[Any]:
        pick, number = self._random.choice, lambda: self._random.choice(_NUMBERS)
        size = lambda: self._random.choice([0, 1, 2, 3, 2.0])  # noqa: E731
        rules: list[Any] = [
            lambda: {"type": pick(_TYPES)},
            lambda: {"type": self._some(_TYPES, 1)},
            lambda: {"enum": [value(self._random, 2) for _ in range(pick([1, 2, 3, 20]))]},
            lambda: {"maximum": number()},
            lambda: {"minimum": number()},
            lambda: {"multipleOf": pick(_DIVISORS)},
            lambda: {"minLength": size(), "maxLength": size()},
            lambda: {"pattern": pick(_PATTERNS)},
            lambda: {pick(["minItems", "maxItems"]): size()},
            lambda: {pick(["minProperties", "maxProperties"]): size()},
            lambda: {"uniqueItems": pick([True, True, False])},
            lambda: {"required": self._some(_NAMES, 1)},
        ]
        if self._since == 0:
            rules.append(lambda: {"minimum": number(), "exclusiveMinimum": pick([True, False])})
            rules.append(lambda: {"maximum": number(), "exclusiveMaximum": pick([True, False])})
        else:
            rules.append(lambda: {pick(["exclusiveMinimum", "exclusiveMaximum"]): number()})
            rules.append(lambda: {"const": value(self._random, 2)})
        if self._since >= 3:
            rules.append(lambda: {"dependentRequired": {pick(_NAMES): self._some(_NAMES, 0)}})
        return rules

    def _inside(self, depth: int) -> list[Any]:
        def one() -> Any:
            return self.schema(depth)

        def reference() -> dict[str, Any]:
            return {"$ref": pick([f"#/{self._defs}/x", f"#/{self._defs}/y", "#"])}

        def some() -> list[Any]:
            return [one() for _ in range(pick([1, 2, 3]))]

        def names(inner: Any) -> dict[str, Any]:
            return {name: inner() for name in self._some(_NAMES, 1)}

        pick = self._random.choice
        rules: list[Any] = [
            lambda: {"properties": names(lambda: reference() if self._random.random() < 0.2 else one())},
            lambda: {"patternProperties": {pick(_PATTERNS): one() for _ in range(2)}},
            lambda: {"additionalProperties": pick([one(), False, True])},
            lambda: {"items": reference() if self._random.random() < 0.2 else one()},
            lambda: {"allOf": some()},
            lambda: {"anyOf": some()},
            lambda: {"oneOf": some()},
            lambda: {"not": one()},
            lambda: {"$ref": f"#/{self._defs}/{pick('xy')}"},
        ]
        if self._since < 4:
            rules.append(lambda: {"items": some(), "additionalItems": pick([one(), False, True])})
        else:
            rules.append(lambda: {"prefixItems": some()})
        if self._since < 3:
            rules.append(lambda: {"dependencies": names(lambda: pick([self._some(_NAMES, 1), one()]))})
        else:
            rules += [
                lambda: {"dependentSchemas": names(one)},
                lambda: {"unevaluatedProperties": pick([False, False, one()])},
                lambda: {"unevaluatedItems": pick([False, False, one()])},
                lambda: {"contains": one(), "minContains": pick([0, 1, 2]), "maxContains": pick([1, 2, 3])},
                lambda: {"minContains": 2, "maxContains": 1},
            ]
        if self._since >= 1:
            rules += [lambda: {"contains": one()}, lambda: {"propertyNames": one()}]
        if self._since >= 2:
            rules += [
                lambda: {"if": one(), "then": one(), "else": one()},
                lambda: {"if": one(), "then": one()},
            ]
            rules += [lambda: {"if": one(), "else": one()}, lambda: {"then": one(), "else": one()}]
        return rules

    def _some(self, among: list[str], least: int) -> list[str]:
        return self._random.sample(among, self._random.randrange(least, 4))


# --- against the library -----------------------------------------------------------------------------------


EXACT = Context(prec=400)


def multiple_of(library: Any, divisor: Any, instance: Any, _schema: Any) -> Iterator[Any]:
    """In decimals: the library divides doubles, so that 0.3 is no multiple of 0.1."""
    if library.is_type(instance, "number") and EXACT.remainder(
        Decimal(repr(instance)), Decimal(repr(divisor))
    ):
        yield jsonschema.ValidationError("not a multiple")


def library_of(draft: str) -> Any:
    made = validators.validator_for({"$schema": DRAFTS[draft]})
    # 1.0 is an integer since draft 6, and to us always.
    checker = jsonschema.Draft6Validator.TYPE_CHECKER if draft == "draft-04" else made.TYPE_CHECKER
    rules: dict[str, Any] = {"multipleOf": multiple_of}
    if draft == "2019-09":
        # Its own rule takes the keywords inside additionalProperties for the names of properties.
        latest = jsonschema.Draft202012Validator.VALIDATORS
        rules["unevaluatedProperties"] = latest["unevaluatedProperties"]
    return validators.extend(made, rules, type_checker=checker)


def check_of(schema: Any) -> Callable[[str], str | None]:
    """The final check alone: the schema need not be one that masks can enforce."""
    limits = Limits()
    normal = normalise(Document(read_schema(json.dumps(schema), limits), limits), True, limits)
    check_cycles(normal.definitions)
    return text_check(normal.root, normal.definitions)


def compare(random: Random, draft: str, values: int) -> int:
    """Number of values on which both were asked."""
    schema = Documents(random, draft).document()
    try:
        check = check_of(schema)
    except ConstraintError as refusal:
        if "leads back to itself" in refusal.detail or "leads nowhere" in refusal.detail:
            return 0
        raise
    library, asked = library_of(draft)(schema), 0
    for _ in range(values):
        instance = value(random)
        try:
            expected = library.is_valid(instance)
        except (Unresolvable, TypeError):
            continue  # it looks for no definitions of the root below an $id, and slips over items: true
        problem = check(json.dumps(instance))
        assert (problem is None) == expected, (schema, instance, problem)
        asked += 1
    return asked


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_check_agrees_with_the_library(draft: str) -> None:
    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=25, derandomize=True)
    @given(st.randoms(use_true_random=False))
    def run(random: Random) -> None:
        compare(random, draft, 4)

    run()
    assert sum(compare(Random(seed), draft, 8) for seed in range(120)) > 600


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_check_agrees_with_the_library_at_length(draft: str) -> None:
    assert sum(compare(Random(seed), draft, 12) for seed in range(1_000, 3_000)) > 20_000


@pytest.mark.parametrize(
    ("schema", "text", "valid"),
    [
        ({"exclusiveMinimum": 0.1}, "0.1000000000000000000001", True),
        ({"minimum": 0.1}, "0.0999999999999999999999999", False),
        ({"maximum": 10**300}, "1e400", False),
        ({"type": "integer"}, "1e400", True),
        ({"type": "integer"}, "1.00000000000000000000001", False),
        ({"multipleOf": 0.1}, "0.3", True),
        ({"multipleOf": 0.1}, "0.30000000000000000001", False),
        ({"multipleOf": 0.1}, "1e999999999", True),
        ({"multipleOf": 0.3}, "1e999999999", False),
        ({"multipleOf": 0.3}, "1e-999999999", False),
        ({"multipleOf": 7}, "0e-99", True),
        ({"multipleOf": 3}, "1" * 6_000, True),
        ({"multipleOf": 7}, "1" * 6_001, False),
        ({"maximum": 5}, "1e9999999999999999999", False),
        ({"minimum": 0}, "-1e-9999999999999999999", False),
        ({"minimum": 0}, "0e9999999999999999999", True),
        ({"uniqueItems": True}, "[0.1, 0.10000000000000000000001]", True),
        ({"enum": [0.1]}, "0.10", True),
        ({}, "NaN", False),
        ({}, "-Infinity", False),
    ],
)
def test_numbers_are_what_is_written(schema: Any, text: str, valid: bool) -> None:
    """And not the nearest double: masks compare figures."""
    assert (check_of(schema)(text) is None) == valid


# --- formats ------------------------------------------------------------------------------------------------


def holds(make: Callable[[str], Any], text: str) -> bool:
    try:
        make(text)
    except ValueError:
        return False
    return True


def is_date(text: str) -> bool:
    return re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", text) is not None and holds(
        datetime.date.fromisoformat, text
    )


def is_date_time(text: str) -> bool:
    found = re.fullmatch(r"(.{10})[tT](.{8})(?:\.[0-9]+)?(?:[zZ]|[+-](..:..))", text)
    return (
        found is not None
        and is_date(found[1])
        and is_clock(found[2])
        and is_clock(f"{found[3] or '00:00'}:00")
    )


def is_clock(text: str) -> bool:
    return re.fullmatch("[0-9]{2}(:[0-9]{2}){2}", text) is not None and holds(
        datetime.time.fromisoformat, text
    )


FORMATS: list[tuple[str, Callable[[str], bool], str, list[str]]] = [
    ("date", is_date, "0123456789-", ["2024-02-29", "1900-02-28", "2000-02-29", "2023-12-31"]),
    ("date-time", is_date_time, "0123456789-:TZ.+", ["2024-02-29T23:59:59Z", "2021-06-30t00:00:00.5+05:30"]),
    ("ipv4", lambda text: holds(ipaddress.IPv4Address, text), "0123456789.", ["127.0.0.1", "255.250.1.9"]),
    (
        "ipv6",
        lambda text: holds(ipaddress.IPv6Address, text),
        "0123abF:.",
        ["::", "1::8", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "1:2:3:4:5:6:7::", "1::3:4:5:6:7:1.2.3.4"],
    ),
]


@pytest.mark.parametrize(("name", "oracle", "alphabet", "seeds"), FORMATS, ids=[row[0] for row in FORMATS])
def test_formats_are_what_the_standard_library_reads(
    name: str, oracle: Callable[[str], bool], alphabet: str, seeds: list[str]
) -> None:
    known = format_schema(name)
    assert known is not None
    random, seen = Random(name), {True: 0, False: 0}
    for _ in range(3_000):
        text = random.choice(seeds)
        for _ in range(random.randrange(4)):
            at = random.randrange(len(text) + 1)
            text = text[:at] + random.choice([random.choice(alphabet), ""]) + text[at + random.randrange(2) :]
        if text.startswith("0000") or ":60" in text:  # a year, and a second, that only RFC 3339 knows
            continue
        expected = oracle(text)
        assert matches(str(known["pattern"]), text) == expected, text
        seen[expected] += 1
    assert min(seen.values()) > 300
