"""Which calls a trace may make: those that do nothing but compute their result."""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

from trellis.frontend import expressions, group

ROLES = frozenset(
    {
        expressions.role,
        expressions.system,
        expressions.user,
        expressions.assistant,
        expressions.system_begin,
        expressions.system_end,
        expressions.user_begin,
        expressions.user_end,
        expressions.assistant_begin,
        expressions.assistant_end,
        group.fork,
        group.join,
    }
)
"""Functions of the language that take symbolic text, or none."""

EXPRESSIONS = frozenset({expressions.gen, expressions.select})
"""Functions of the language that make an expression; with symbolic arguments the run calls them."""

STR_METHODS = frozenset(
    {
        "capitalize",
        "casefold",
        "center",
        "expandtabs",
        "format",
        "format_map",
        "join",
        "ljust",
        "lower",
        "lstrip",
    }
    | {
        "removeprefix",
        "removesuffix",
        "replace",
        "rjust",
        "rstrip",
        "strip",
        "swapcase",
        "title",
        "upper",
        "zfill",
    }
)
"""Methods of a string that give a string. On a symbolic value they are noted down, and called in the run."""

RECORDED: frozenset[Callable[..., Any]] = frozenset({str, repr, format})
"""With a symbolic argument these are noted down, and called in the run."""

_BUILTINS: frozenset[Any] = frozenset(
    {
        abs,
        all,
        any,
        ascii,
        bin,
        bool,
        chr,
        dict,
        divmod,
        enumerate,
        float,
        format,
        frozenset,
        hex,
        int,
        isinstance,
        len,
    }
    | {list, max, min, oct, ord, pow, range, repr, reversed, round, set, slice, sorted, str, sum, tuple, zip}
)
_LIBRARY: frozenset[Any] = frozenset(
    {json.dumps, json.loads, textwrap.dedent, textwrap.indent, textwrap.fill, textwrap.wrap, textwrap.shorten}
    | {re.compile, re.escape, re.findall, re.fullmatch, re.match, re.search, re.split, re.sub}
    | {math.ceil, math.floor, math.sqrt}
)
_IMMUTABLE = (
    str,
    bytes,
    int,
    float,
    bool,
    complex,
    tuple,
    frozenset,
    range,
    re.Pattern,
    re.Match,
    type(None),
)
_LOOKING: dict[type, frozenset[str]] = {
    list: frozenset({"copy", "count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    set: frozenset({"copy", "difference", "intersection", "isdisjoint", "issubset", "issuperset", "union"}),
}
_ITERABLE: tuple[type, ...] = (
    *(list, tuple, dict, set, frozenset, str, bytes, range, zip, enumerate, reversed),
    *(type({}.keys()), type({}.values()), type({}.items()), type(iter([])), type(reversed([]))),
)


def is_pure(function: Any) -> bool:
    """Whether calling it with plain arguments has no effect but its result."""
    try:
        return function in _BUILTINS or function in _LIBRARY or _is_pure_method(function)
    except TypeError:  # it cannot be hashed
        return False


def _is_pure_method(function: Any) -> bool:
    if not isinstance(function, types.BuiltinMethodType):
        return False
    owner = function.__self__
    return type(owner) in _IMMUTABLE or function.__name__ in _LOOKING.get(type(owner), ())


def is_method_of(function: Any, kinds: tuple[type, ...]) -> bool:
    """Whether it is a built-in method of an object of one of these types."""
    return isinstance(function, types.BuiltinMethodType) and type(function.__self__) in kinds


def may_iterate(value: Any) -> bool:
    """Whether going through it leaves it as it was. Generators and files are used up."""
    return type(value) in _ITERABLE


def may_follow(function: types.FunctionType) -> bool:
    """Whether it is the user's own: Python's library and the language itself do things in ways of their own."""
    package = (function.__module__ or "").partition(".")[0]
    return package != "trellis" and package not in sys.stdlib_module_names


def called(function: Any) -> str:
    """The name of what is called, for messages."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    return f"{name}()" if isinstance(name, str) else f"an object of type {type(function).__name__}"
