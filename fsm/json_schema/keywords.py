"""What the value of each keyword must look like, and how it is written in the one draft used inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trellis.fsm.json_schema.errors import Unenforceable, malformed
from trellis.fsm.json_schema.lookahead import split_lookahead
from trellis.fsm.json_schema.matching import matcher
from trellis.fsm.json_schema.pattern_nfa import TooHard
from trellis.fsm.json_schema.patterns import PatternError, translate
from trellis.fsm.json_schema.values import EVERY_TYPE, freeze

_TYPE_NAMES = (EVERY_TYPE - {"fraction"}) | {"number"}


def read_type(value: Any, where: str) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        raise malformed(where, "type must be a name of a type or a list of them")
    for name in names:
        if not isinstance(name, str) or name not in _TYPE_NAMES:
            known = ", ".join(sorted(_TYPE_NAMES))
            raise malformed(where, f"unknown type {name!r}; there are: {known}")
    return list(dict.fromkeys(names))


def read_enum(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise malformed(where, "enum must be a list of values")
    return list({freeze(item): item for item in reversed(value)}.values())[::-1]


def read_count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise malformed(where, f"must be a whole number, 0 or more, not {value!r}")
    return value


def read_number(value: Any, where: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise malformed(where, f"must be a number, not {value!r}")
    return value


def read_divisor(value: Any, where: str) -> int | float:
    if read_number(value, where) <= 0:
        raise malformed(where, f"must be above 0, not {value!r}")
    return value  # type: ignore[no-any-return]


def read_flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise malformed(where, f"must be true or false, not {value!r}")
    return value


def read_names(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise malformed(where, "must be a list of property names")
    return list(dict.fromkeys(value))


def read_name_lists(value: Any, where: str) -> dict[str, list[str]]:
    if not isinstance(value, dict):
        raise malformed(where, "must be an object of lists of property names")
    return {name: read_names(names, where) for name, names in value.items()}


def read_pattern(value: Any, where: str) -> str:
    """In the form of ``patterns.translate``. Unenforceable if it is not regular."""
    if not isinstance(value, str):
        raise malformed(where, "a pattern must be a string")
    try:
        pattern = translate(value)
        matcher(pattern)
        return pattern
    except TooHard as error:
        raise Unenforceable("pattern", where, f"the pattern is too large ({error})") from None
    except PatternError as error:
        if error.unsupported:
            raise Unenforceable("pattern", where, str(error)) from None
        raise malformed(where, str(error)) from None


def read_patterns(value: Any, where: str) -> tuple[list[str], list[str]]:
    """Patterns that must be found, and patterns that must not be, in place of one that begins with look-ahead."""
    if not isinstance(value, str):
        raise malformed(where, "a pattern must be a string")
    rest, ahead = split_lookahead(value)
    alike = [read_pattern(pattern, where) for wanted, pattern in ahead if wanted]
    unlike = [read_pattern(pattern, where) for wanted, pattern in ahead if not wanted]
    return [*alike, read_pattern(rest, where)], unlike


# Keywords whose values hold no schema; those that need more than their own value are read in ``normalise``.
READERS: dict[str, Callable[[Any, str], Any]] = {
    "type": read_type,
    "enum": read_enum,
    "multipleOf": read_divisor,
    "minLength": read_count,
    "maxLength": read_count,
    "minItems": read_count,
    "maxItems": read_count,
    "minContains": read_count,
    "maxContains": read_count,
    "minProperties": read_count,
    "maxProperties": read_count,
    "uniqueItems": read_flag,
    "required": read_names,
    "dependentRequired": read_name_lists,
}
