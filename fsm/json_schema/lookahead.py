"""Look-ahead at the start of an anchored pattern, taken apart.

``^(?=A)(?!B)C`` is found where ``^(?:A)`` and ``^C`` are found and ``^(?:B)`` is not; that is how rules for
passwords and names are written. Look-around anywhere else is left in the pattern.
"""

from __future__ import annotations

import re

_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]|[^\\\[()|]+", re.DOTALL)


def split_lookahead(pattern: str) -> tuple[str, list[tuple[bool, str]]]:
    """The rest of the pattern, and for each look-ahead whether it is wanted and its pattern."""
    found: list[tuple[bool, str]] = []
    at = 1
    while pattern.startswith("^") and pattern.startswith(("(?=", "(?!"), at):
        end = _closing(pattern, at)
        if end is None:
            break
        found.append((pattern[at + 2] == "=", f"^(?:{pattern[at + 3 : end]})"))
        at = end + 1
    rest = pattern[at:]
    if not found or _alternatives(rest):
        return pattern, []
    return f"^{rest}", found


def _closing(pattern: str, opening: int) -> int | None:
    """Where the group that opens there closes."""
    depth = 0
    for atom in _ATOM.finditer(pattern, opening):
        depth += (atom[0] == "(") - (atom[0] == ")")
        if depth == 0:
            return atom.start()
    return None


def _alternatives(pattern: str) -> bool:
    """Is there a ``|`` outside of every group?"""
    depth = 0
    for atom in _ATOM.finditer(pattern):
        depth += (atom[0] == "(") - (atom[0] == ")")
        if atom[0] == "|" and depth == 0:
            return True
    return False
