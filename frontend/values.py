"""What ``gen(type=...)`` lets the model write, and the values that it becomes.

Scalars, enums and literals are written bare, as a person would write them; everything else as JSON.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from trellis.errors import InvalidRequestError
from trellis.frontend.backends.base import Constraint
from trellis.frontend.schemas import Reader

# A number ends where the model would go on after it: at a blank, which is cut off with all that follows.
_BLANKS = (" ", "\n", "\t", "\r")
_ENDS = r"(?:[ \n\t\r][\s\S]*)?"
_INTEGER = r"-?(?:0|[1-9][0-9]{0,17})"
_FLOAT = rf"{_INTEGER}(?:\.[0-9]{{1,17}})?(?:[eE][+-]?[0-9]{{1,3}})?"

# The Gregorian calendar from the year 1000 on: days of a month, and February 29 in leap years.
_MONTHS = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP = r"(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29"
_DATE = rf"(?:[1-9][0-9]{{3}}-{_MONTHS}|{_LEAP})"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"


@dataclass(frozen=True)
class Bare:
    """constraint: None where any text will do. read: text → value; None where the value is the text. stops: strings
    that end the value and are no part of it."""

    constraint: Constraint | None
    read: Reader | None
    stops: tuple[str, ...] = ()


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is neither True nor False")
    return text.lower() == "true"


_SCALARS: Mapping[Any, Bare] = MappingProxyType(
    {
        str: Bare(None, None),
        int: Bare(Constraint("regex", _INTEGER + _ENDS), int, _BLANKS),
        float: Bare(Constraint("regex", _FLOAT + _ENDS), float, _BLANKS),
        bool: Bare(Constraint("choices", '["True", "False", "true", "false"]'), _truth),
        datetime.date: Bare(Constraint("regex", _DATE), datetime.date.fromisoformat),
        datetime.time: Bare(Constraint("regex", _TIME), datetime.time.fromisoformat),
        datetime.datetime: Bare(Constraint("regex", f"{_DATE}[T ]{_TIME}"), datetime.datetime.fromisoformat),
    }
)


def bare(python_type: Any) -> Bare | None:
    """How values of a type are written without JSON; None for a type that has no such form.

    Raises InvalidRequestError for an enum or a literal of which two members are written alike, or are no text.
    """
    try:
        found = _SCALARS.get(python_type)
    except TypeError:  # it cannot be hashed
        return None
    if found is not None:
        return found
    if isinstance(python_type, type) and issubclass(python_type, Enum):
        return _one_of(repr(python_type), [(member.value, member) for member in python_type])
    if get_origin(python_type) is Literal:
        return _one_of(repr(python_type), [(_plain(value), value) for value in get_args(python_type)])
    return None


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _one_of(owner: str, members: Sequence[tuple[Any, Any]]) -> Bare:
    """members: (what is written, the value)."""
    by_text: dict[str, Any] = {}
    for written, value in members:
        if not isinstance(written, (str, int, float)) or written == "":
            raise InvalidRequestError(
                "gen.type", f"{value!r} of {owner} is not text or a number to be written"
            )
        if str(written) in by_text:
            reason = f"{value!r} and {by_text[str(written)]!r} of {owner} are both written {str(written)!r}"
            raise InvalidRequestError("gen.type", reason)
        by_text[str(written)] = value
    if not by_text:
        raise InvalidRequestError("gen.type", f"{owner} has no members")
    source = json.dumps(list(by_text), ensure_ascii=False)
    return Bare(Constraint("choices", source), partial(_member, by_text))


def _member(by_text: Mapping[str, Any], text: str) -> Any:
    if text not in by_text:
        raise ValueError(f"{text!r} is none of {', '.join(by_text)}")
    return by_text[text]


def checked(value: Any, wanted: Any, name: str) -> Any:
    """The value, if it is of this type. TypeError otherwise."""
    if isinstance(wanted, type) and not get_args(wanted) and not hasattr(wanted, "__required_keys__"):
        fits: Callable[[Any], bool] = lambda each: isinstance(each, wanted)  # noqa: E731
    else:
        fits = _validator(wanted)
    if isinstance(value, bool) and wanted in (int, float):
        fits = lambda _each: False  # noqa: E731
    if fits(value):
        return value
    shown = getattr(wanted, "__name__", None) if isinstance(wanted, type) and not get_args(wanted) else None
    raise TypeError(
        f"variable {name!r} is {type(value).__name__} {value!r:.100}, not {shown or wanted!r}; give its gen "
        "type=... or schema=... of what it shall be"
    )


def _validator(wanted: Any) -> Callable[[Any], bool]:
    from pydantic import TypeAdapter, ValidationError

    adapter: TypeAdapter[Any] = TypeAdapter(wanted)

    def fits(value: Any) -> bool:
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError:
            return False
        return True

    return fits
