"""A light walk over the text of a regex: where its groups and escapes are.

Python's parser gives a tree without places; this gives error messages theirs, and bounds the nesting before
the (recursive) parser runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_GLOBAL_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x[a-zA-Z]*\)")
_GROUP = re.compile(r"\((?:\?(?:P=|P<|<[=!]|[=!:>#(]|[a-zA-Z-]+[:)])?)?")


def tokens(pattern: str) -> Iterator[tuple[int, str]]:
    r"""(position, token) of every group opening (``(``, ``(?=``, ...), ``)``, escape, class and other character.

    A class in brackets is one token, ``[``; comments are left out.
    """
    verbose = _GLOBAL_VERBOSE.match(pattern) is not None
    i = 0
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            yield i, pattern[i : i + 2]
            i += 2
        elif char == "[":
            yield i, char
            i = _class_end(pattern, i)
        elif char == "(":
            opening = _group_opening(pattern, i)
            if opening == "(?#":
                i = _after(pattern, ")", i)
                continue
            yield i, opening
            # A group that only sets flags, like (?i), opens nothing.
            i += len(opening)
        elif char == "#" and verbose:
            i = _after(pattern, "\n", i)
        else:
            yield i, char
            i += 1


def _group_opening(pattern: str, i: int) -> str:
    match = _GROUP.match(pattern, i)
    return match.group() if match else "("


def _after(pattern: str, char: str, i: int) -> int:
    end = pattern.find(char, i)
    return len(pattern) if end < 0 else end + 1


def _class_end(pattern: str, i: int) -> int:
    i += 1
    if pattern[i : i + 1] == "^":
        i += 1
    if pattern[i : i + 1] == "]":
        i += 1  # a bracket that stands first is a member
    while i < len(pattern) and pattern[i] != "]":
        i += 2 if pattern[i] == "\\" else 1
    return i + 1


def nesting(pattern: str) -> int:
    """Greatest depth of groups."""
    depth = deepest = 0
    for _, token in tokens(pattern):
        if token.startswith("(") and not token.endswith(")"):
            depth += 1
            deepest = max(deepest, depth)
        elif token == ")":
            depth = max(depth - 1, 0)
    return deepest


def find(pattern: str, wanted: str) -> int:
    """Position of the first token that the regex ``wanted`` matches in full; 0 if there is none."""
    test = re.compile(wanted)
    return next((at for at, token in tokens(pattern) if test.fullmatch(token)), 0)


def find_possessive(pattern: str) -> int:
    """Position of the first possessive quantifier or atomic group; 0 if there is none."""
    before = before_that = ""
    for at, token in tokens(pattern):
        if token == "(?>":
            return at
        if token == "+" and before in ("*", "+", "?", "}") and before_that not in ("", "(", "|"):
            return at
        before_that, before = before, token
    return 0
