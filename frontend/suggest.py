"""Names that were mistyped, and what was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Other words for arguments that are spelled nothing like them.
OTHERWISE = {"options": "choices", "format": "schema", "response_format": "schema", "model": "backend"}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'max_tokens'?``, or nothing if no known name is close."""
    import difflib

    names = list(known)
    meant = OTHERWISE.get(name)
    close = [meant] if meant in names else difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def suggests(function: Callable[P, R]) -> Callable[P, R]:
    """The function; the TypeError for a keyword that it does not have names the one that was probably meant."""
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                hint = did_you_mean(name, known)
                raise TypeError(f"{function.__name__}() has no argument {name!r}{hint}")
        return function(*args, **kwargs)

    return checked
