r"""Which escapes the strings of a schema may hold.

Two spellings of one property name are one property. Where an object declares names and leaves others open,
llguidance takes ``\u0061`` for an other name than ``a``; so there ``\u`` must not be written at all, and
nothing that can be said with it alone. Where all names are declared, strings may hold every escape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trellis.errors import ConstraintError
from trellis.fsm.charset import complement, intersect, normalize
from trellis.fsm.limits import Limits
from trellis.fsm.regex import Regex
from trellis.fsm.syntax import Chars, walk

# What JSON says in no other way than \uXXXX: control characters, but for those with a letter of their own.
_CONTROLS = normalize([(0x00, 0x07), (0x0B, 0x0B), (0x0E, 0x1F), (0x7F, 0x7F)])
_OTHERS = complement(_CONTROLS)
_RAW = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_MENTIONED = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]|\\[xu]|\\[av]|\\c|\\0")


def escape_options(schema: Any, limits: Limits) -> dict[str, Any]:
    """Options of llguidance's JSON compiler. Raises ConstraintError where names are open and a literal needs
    what may not be written."""
    if all(_is_closed(part) for part in _schemas(schema)):
        return {"json_allow_general_unicode_escapes": True}
    for part in _schemas(schema):
        literals = [part[name] for name in ("enum", "const") if name in part]
        patterns = [part["pattern"]] if "pattern" in part else []
        patterns += list(part.get("patternProperties", {}))
        if _has_control(literals) or any(_demands_control(pattern, limits) for pattern in patterns):
            raise ConstraintError(
                "schema",
                "unsupported",
                "",
                "control characters in enum, const or pattern cannot be enforced next to objects that declare "
                "properties and allow others; say additionalProperties: false there",
            )
    return {"json_allowed_escapes": '"\\bfnrt'}


def _is_closed(schema: dict[str, Any]) -> bool:
    declares = "properties" in schema or "patternProperties" in schema
    return not declares or schema.get("additionalProperties") is False


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema inside a lowered one, with itself."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending.extend(part)
        elif isinstance(part, dict):
            yield part
            for keyword, value in part.items():
                if keyword in ("properties", "patternProperties", "$defs"):
                    pending.extend(value.values())
                elif keyword not in ("enum", "const"):
                    pending.append(value)


def _has_control(value: Any) -> bool:
    if isinstance(value, str):
        return _RAW.search(value) is not None
    if isinstance(value, list):
        return any(map(_has_control, value))
    return isinstance(value, dict) and any(_has_control([name, inner]) for name, inner in value.items())


def _demands_control(pattern: str, limits: Limits) -> bool:
    """Is there a place in the pattern where only such a character fits? (A larger set loses a member, no more.)"""
    if not _MENTIONED.search(pattern):
        return False
    try:
        regex = Regex(pattern, limits)
        tree = regex.tree(regex.builder())
    except ConstraintError:
        return True
    return any(isinstance(node, Chars) and not intersect(node.ranges, _OTHERS) for node in walk(tree))
