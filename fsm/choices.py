"""The options of a ``choices`` constraint: read, checked, and those that a vocabulary can write."""

from __future__ import annotations

import json
from typing import Any

from trellis.errors import ConstraintError
from trellis.fsm.charset import Ranges
from trellis.fsm.limits import Limits
from trellis.fsm.spelling import writable


def read_options(source: str, limits: Limits) -> list[str]:
    """The options, without duplicates, or a ConstraintError.

    An empty option among others is allowed: the text may then end at once. Alone it leaves nothing to generate.
    """
    try:
        parsed: Any = json.loads(source)
    except (ValueError, RecursionError) as error:
        where = f"position {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise _refuse("syntax", where, "not a JSON array of strings") from error
    if not isinstance(parsed, list):
        raise _refuse("syntax", "", f"must be a JSON array of strings, not {type(parsed).__name__}")
    if len(parsed) > limits.choices:
        raise _refuse("limit", "", f"{len(parsed)} options; at most {limits.choices} are allowed")
    total = 0
    for index, option in enumerate(parsed):
        if not isinstance(option, str):
            raise _refuse("syntax", f"option {index}", f"must be a string, not {type(option).__name__}")
        try:
            total += len(option.encode())
        except UnicodeEncodeError as error:
            reason = "holds a lone surrogate, which UTF-8 text cannot carry"
            raise _refuse("syntax", f"option {index}", reason) from error
    if total > limits.choices_bytes:
        raise _refuse(
            "limit", "", f"the options have {total} bytes; at most {limits.choices_bytes} are allowed"
        )
    if not any(parsed):
        raise _refuse("empty", "", "there must be at least one option that is not the empty string")
    return list(dict.fromkeys(parsed))


def writable_options(options: list[str], alphabet: Ranges) -> tuple[list[str], list[str]]:
    """The options that can be written in this alphabet, and warnings about those that cannot.

    Raises ConstraintError when none is left.
    """
    everything = writable(alphabet, "".join(options))
    written = options if everything else [o for o in options if writable(alphabet, o)]
    if not any(written):
        raise _refuse(
            "empty", "", "no option can be written with this model's vocabulary, which lacks some bytes"
        )
    lost = len(options) - len(written)
    return written, (
        [f"choices: {lost} options need bytes that the vocabulary lacks and are left out"] if lost else []
    )


def _refuse(code: str, where: str, reason: str) -> ConstraintError:
    return ConstraintError("choices", code, where, reason)
