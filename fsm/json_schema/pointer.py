"""JSON pointers in fragment form: ``#/properties/a~1b``."""

from __future__ import annotations

from urllib.parse import unquote


def child(pointer: str, key: str | int) -> str:
    return f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}"


def segments(fragment: str) -> list[str]:
    """Keys of a percent-encoded fragment ``/a/b`` (without the ``#``); ``""`` has none."""
    parts = unquote(fragment).split("/")[1:]
    return [part.replace("~1", "/").replace("~0", "~") for part in parts]
