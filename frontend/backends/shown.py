"""A value of unknown origin, for an error message."""

from __future__ import annotations

import reprlib


def shown(value: object, length: int = 60) -> str:
    """Its repr, cut to about ``length`` characters; neither size nor depth of the value can do harm."""
    short = reprlib.Repr()
    short.maxlevel = 4
    short.maxstring = short.maxother = short.maxlong = length
    short.maxdict = short.maxlist = 8
    text = short.repr(value)
    return text if len(text) <= length else text[:length] + "..."
