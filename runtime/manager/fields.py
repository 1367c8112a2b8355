"""Reading a client's JSON object field by field, so that every mistake is answered by the field's name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any, overload

from trellis.errors import InvalidRequestError


def kind_of(value: Any) -> str:
    """The JSON name of a value's type, for messages."""
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list"}
    if value is None:
        return "null"
    return names.get(type(value), "an object" if isinstance(value, Mapping) else type(value).__name__)


def check_text(text: str, field: str) -> str:
    """Text that has a UTF-8 form, as tokenizers and the wire need; lone surrogates do not.

    Raises InvalidRequestError.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = (
            f"is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
        )
        raise InvalidRequestError(field, reason) from None
    return text


class Fields:
    """One JSON object. Read every field that is known, then call ``done``: whatever was not read is refused.

    ``None`` (JSON null) always means the default. All methods raise InvalidRequestError, which names the field
    as the client wrote it: ``path`` stands in front, e.g. ``sampling_params.``.
    """

    def __init__(self, raw: Any, path: str = "") -> None:
        if not isinstance(raw, Mapping):
            raise InvalidRequestError(path or "body", f"must be an object, not {kind_of(raw)}")
        self._raw = raw
        self._path = path
        self._read: dict[str, None] = {}

    def name(self, field: str) -> str:
        return f"{self._path}.{field}" if self._path else field

    def error(self, field: str, reason: str) -> InvalidRequestError:
        return InvalidRequestError(self.name(field), reason)

    def get(self, field: str) -> Any:
        """The raw value; None when absent."""
        self._read[field] = None
        return self._raw.get(field)

    def boolean(self, field: str, default: bool = False) -> bool:
        value = self.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, not {kind_of(value)}")
        return value

    @overload
    def integer(self, field: str, default: int, low: int | None = None, high: int | None = None) -> int: ...

    @overload
    def integer(
        self, field: str, default: None = None, low: int | None = None, high: int | None = None
    ) -> int | None: ...

    def integer(
        self, field: str, default: int | None = None, low: int | None = None, high: int | None = None
    ) -> int | None:
        value = self.get(field)
        if value is None:
            return default
        return self.check_integer(value, field, low, high)

    def check_integer(self, value: Any, field: str, low: int | None = None, high: int | None = None) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(field, f"must be an integer, not {kind_of(value)}")
        if (low is not None and value < low) or (high is not None and value > high):
            raise self.error(field, f"must be {_interval(low, high)}, not {brief(value)}")
        return value

    def number(
        self,
        field: str,
        default: float,
        low: float | None = None,
        high: float | None = None,
        open_low: bool = False,
    ) -> float:
        """A finite number within [low, high], or (low, high] with open_low."""
        value = self.get(field)
        if value is None:
            return default
        return self.check_number(value, field, low, high, open_low)

    def check_number(
        self,
        value: Any,
        field: str,
        low: float | None = None,
        high: float | None = None,
        open_low: bool = False,
    ) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.error(field, f"must be a number, not {kind_of(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.error(field, "must be finite")
        too_low = low is not None and (number < low or (open_low and number == low))
        if too_low or (high is not None and number > high):
            raise self.error(field, f"must be {_interval(low, high, open_low)}, not {brief(value)}")
        return number

    @overload
    def string(self, field: str, default: str, limit: int | None = None) -> str: ...

    @overload
    def string(self, field: str, default: None = None, limit: int | None = None) -> str | None: ...

    def string(self, field: str, default: str | None = None, limit: int | None = None) -> str | None:
        value = self.get(field)
        if value is None:
            return default
        return self.check_string(value, field, limit)

    def check_string(self, value: Any, field: str, limit: int | None = None) -> str:
        if not isinstance(value, str):
            raise self.error(field, f"must be a string, not {kind_of(value)}")
        if limit is not None and len(value) > limit:
            raise self.error(field, f"must have at most {limit} characters, not {len(value)}")
        return check_text(value, self.name(field))

    def elements(self, field: str, limit: int | None = None) -> list[Any]:
        """A list of anything; [] when absent."""
        value = self.get(field)
        if value is None:
            return []
        if not isinstance(value, (list, tuple)):
            raise self.error(field, f"must be a list, not {kind_of(value)}")
        if limit is not None and len(value) > limit:
            raise self.error(field, f"must have at most {limit} entries, not {len(value)}")
        return list(value)

    def only(self, field: str, accepted: Collection[Any], reason: str) -> None:
        """A field of other systems that has no effect here: refuse every value that asks for one."""
        value = self.get(field)
        # Of the same type too: 0 is no false, and true is no 1.
        if value is not None and not any(value == each and type(value) is type(each) for each in accepted):
            raise self.error(field, reason)

    def done(self) -> None:
        """Refuse fields that nobody read, with the nearest known name."""
        unknown = [name for name in self._raw if name not in self._read]
        if not unknown:
            return
        name = str(unknown[0])
        near = difflib.get_close_matches(name, list(self._read), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(sorted(self._read))}"
        raise self.error(name[:100].encode(errors="replace").decode(), f"unknown field; {hint}")


def _interval(low: float | None, high: float | None, open_low: bool = False) -> str:
    least, most = (f"{each:g}" if isinstance(each, float) else str(each) for each in (low, high))
    if low is not None and high is not None:
        return f"{'above' if open_low else 'from'} {least} {'and at most' if open_low else 'to'} {most}"
    return f"{'above' if open_low else 'at least'} {least}" if low is not None else f"at most {most}"


def brief(value: Any) -> str:
    """A wrong value as messages show it."""
    # repr() of an integer with thousands of digits is itself an error in Python.
    if isinstance(value, int) and abs(value) >= 1 << 80:
        return "an integer of that size"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
