"""From the text of a schema to JSON values, safely."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

from trellis.errors import ConstraintError
from trellis.fsm.json_schema.pointer import child
from trellis.fsm.limits import Limits

# Everything that can open, close or hide a bracket.
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)
# A sub-schema lies in up to two brackets (of ``properties`` and its own); values in enums may nest, too.
_BRACKETS_PER_SCHEMA = 3


def read_schema(source: str, limits: Limits) -> Any:
    """The schema as JSON values; integral floats become ints, as JSON schema does not tell them apart.

    Raises ConstraintError: ``limit`` when it is too large, ``syntax`` when it is no JSON or not a schema.
    """
    try:
        size = len(source.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ConstraintError(
            "schema", "syntax", f"position {error.start}", "a lone surrogate is not a character"
        ) from None
    if size > limits.schema_bytes:
        raise ConstraintError(
            "schema", "limit", "", f"the schema has {size} bytes; at most {limits.schema_bytes} are allowed"
        )
    _check_nesting(source, _BRACKETS_PER_SCHEMA * limits.schema_depth)
    try:
        schema = json.loads(source, parse_constant=_no_constant, parse_float=_number)
    except json.JSONDecodeError as error:
        raise ConstraintError(
            "schema", "syntax", f"position {error.pos}", f"not valid JSON: {error.msg}"
        ) from None
    except ValueError as error:  # from the hooks, or an integer with thousands of digits
        raise ConstraintError("schema", "syntax", "", f"not valid JSON: {error}") from None
    _check_strings(schema)
    if not isinstance(schema, dict | bool):
        raise ConstraintError("schema", "syntax", "#", "a schema is an object, true or false")
    return schema


def _check_nesting(source: str, limit: int) -> None:
    """Before parsing, since a parser may recurse."""
    depth = 0
    for match in _BRACKETS.finditer(source):
        first = source[match.start()]
        depth += (first in "[{") - (first in "]}")
        if depth > limit:
            raise ConstraintError(
                "schema", "limit", f"position {match.start()}", f"nested deeper than {limit} brackets"
            )


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _number(text: str) -> int | float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:40]} is too large")
    return int(Decimal(text)) if value.is_integer() else value


def _check_strings(schema: Any) -> None:
    """Escapes can spell a lone surrogate, which no text can contain."""
    pending: list[tuple[Any, str]] = [(schema, "#")]
    while pending:
        value, at = pending.pop()
        if isinstance(value, str):
            _check_string(value, at)
        elif isinstance(value, list):
            pending.extend((item, child(at, i)) for i, item in enumerate(value))
        elif isinstance(value, dict):
            for key, item in value.items():
                _check_string(key, at)
                pending.append((item, child(at, key)))


def _check_string(value: str, at: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ConstraintError(
            "schema",
            "syntax",
            at.encode("utf-8", "backslashreplace").decode(),
            "a lone surrogate is not a character",
        ) from None
