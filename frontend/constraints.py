"""The constraint of a gen: checked where it is written, and how its text becomes a value."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trellis.errors import ConstraintError, InvalidRequestError
from trellis.frontend.backends.base import Constraint
from trellis.frontend.schemas import Reader, read_schema, read_type
from trellis.frontend.values import bare

SPACINGS = ("spaced", "compact", "any")


@dataclass(frozen=True)
class Constrained:
    """constraint: for the backend. read: text → value; None where the value is the text. stops: strings that end the
    value, besides those that the gen has."""

    constraint: Constraint | None = None
    read: Reader | None = None
    stops: tuple[str, ...] = ()


def constrained(
    regex: str | None,
    choices: Sequence[str] | None,
    schema: Any,
    grammar: str | None,
    value_type: Any,
    json_spacing: str | None,
    strict: bool | None,
) -> Constrained:
    """The one constraint that is given, if any. Raises InvalidRequestError or ConstraintError."""
    arguments = {
        "regex": regex,
        "choices": choices,
        "schema": schema,
        "grammar": grammar,
        "type": value_type,
    }
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) > 1:
        narrow = "; a type itself can be narrower: Literal[1, 2, 3], Annotated[int, Field(ge=1, le=5)]"
        raise InvalidRequestError(
            "gen",
            f"{given[0]} and {given[1]} are both given; a gen takes one constraint"
            f"{narrow if value_type is not None else ''}",
        )
    written = None if value_type is None else bare(value_type)
    if schema is None and (value_type is None or written is not None):
        for option, value in (("json_spacing", json_spacing), ("strict", strict)):
            if value is not None:
                raise InvalidRequestError(
                    f"gen.{option}", "only goes with schema, or a type that is written as JSON"
                )
    if regex is not None:
        return Constrained(_regex(regex))
    if choices is not None:
        options = check_options("gen.choices", choices)
        return Constrained(Constraint("choices", json.dumps(options, ensure_ascii=False)))
    if grammar is not None:
        if not isinstance(grammar, str) or not grammar.strip():
            raise InvalidRequestError("gen.grammar", f"must be the text of a grammar, got {grammar!r:.100}")
        return Constrained(Constraint("grammar", grammar))
    if written is not None:
        return Constrained(written.constraint, written.read, written.stops)
    if value_type is not None:
        return _schema(value_type, json_spacing, strict, "gen.type")
    return Constrained() if schema is None else _schema(schema, json_spacing, strict, "gen.schema")


def _schema(schema: Any, spacing: str | None, strict: bool | None, where: str) -> Constrained:
    if spacing is not None and spacing not in SPACINGS:
        raise InvalidRequestError(
            "gen.json_spacing", f"must be one of {', '.join(SPACINGS)}, got {spacing!r}"
        )
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError("gen.strict", f"must be True or False, got {strict!r}")
    text, read = read_schema(schema) if where == "gen.schema" else read_type(schema, where)
    return Constrained(Constraint("schema", text, spacing or SPACINGS[0], strict is not False), read)


def _regex(regex: str) -> Constraint:
    if not isinstance(regex, str):
        raise InvalidRequestError("gen.regex", f"must be a string, got {type(regex).__name__}")
    try:
        re.compile(regex)
    except (re.error, OverflowError, RecursionError) as error:
        position = getattr(error, "pos", None)
        where = f"position {position}" if position is not None else ""
        reason = getattr(error, "msg", None) or str(error)
        raise ConstraintError("regex", "syntax", where, f"{reason} in {regex!r}") from error
    return Constraint("regex", regex)


def check_options(where: str, choices: Any) -> tuple[str, ...]:
    """At least one option, all of them different and not empty."""
    if not isinstance(choices, (list, tuple)):
        raise InvalidRequestError(where, f"must be a list of strings, got {choices!r}")
    if not choices:
        raise InvalidRequestError(where, "needs at least one option, got none")
    seen: set[str] = set()
    for index, option in enumerate(choices):
        if not isinstance(option, str):
            raise InvalidRequestError(f"{where}[{index}]", f"must be a string, got {option!r}")
        if not option:
            raise InvalidRequestError(f"{where}[{index}]", "is empty; every option needs text")
        if option in seen:
            raise InvalidRequestError(f"{where}[{index}]", f"{option!r} comes twice")
        seen.add(option)
    return tuple(choices)
