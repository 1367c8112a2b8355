"""The texts of a JSON value that differ in the order of members and in how whole numbers are written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Written:
    """A text, and where each member of each object in it begins: (offset, path of the object, its index)."""

    parts: list[str] = field(default_factory=list)
    members: list[tuple[int, tuple[str | int, ...], int]] = field(default_factory=list)
    length: int = 0

    def add(self, text: str) -> None:
        self.parts.append(text)
        self.length += len(text)

    @property
    def text(self) -> str:
        return "".join(self.parts)


def write(value: Any, separators: tuple[str, str]) -> Written:
    written = Written()
    _write(value, separators, (), written)
    return written


def _write(value: Any, separators: tuple[str, str], path: tuple[str | int, ...], out: Written) -> None:
    if isinstance(value, dict):
        out.add("{")
        for i, (name, inner) in enumerate(value.items()):
            out.members.append((out.length, path, i))
            out.add((separators[0] if i else "") + json.dumps(name, ensure_ascii=False) + separators[1])
            _write(inner, separators, (*path, name), out)
        out.add("}")
    elif isinstance(value, list):
        out.add("[")
        for i, inner in enumerate(value):
            out.add(separators[0] if i else "")
            _write(inner, separators, (*path, i), out)
        out.add("]")
    else:
        out.add(json.dumps(value, ensure_ascii=False))


def whole_numbers(value: Any) -> Any:
    """1.0 as 1."""
    if isinstance(value, dict):
        return {name: whole_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [whole_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def ranks(schema: Any, keyword: str) -> dict[str, int]:
    """Place of each property name in a schema by its first mention; ``keyword`` mentions before others."""
    names: dict[str, int] = {}
    pending = [schema]
    while pending:
        item = pending.pop(0)
        if isinstance(item, dict):
            for key in sorted(item, key=lambda key: key != keyword):
                if key in ("properties", "required") and isinstance(item[key], dict | list):
                    for name in item[key]:
                        names.setdefault(str(name), len(names))
                pending.append(item[key])
        elif isinstance(item, list):
            pending.extend(item)
    return names


def ranked(value: Any, places: dict[str, int]) -> Any:
    """Members in the order of their places; those without one come last."""
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: places.get(name, len(places)))
        return {name: ranked(value[name], places) for name in names}
    return [ranked(inner, places) for inner in value] if isinstance(value, list) else value


def accepted_spelling(
    value: Any, schema: Any, separators: tuple[str, str], tries: int, reach: Callable[[str], int]
) -> tuple[str | None, bool]:
    """A text of the value that is accepted, and whether it is the one as given; (None, False) if none is found.

    reach: number of characters of a text that are accepted; one more than it has if the whole is. tries: texts
    that are looked at, at most, from each of the orders that a search begins with: as given, and as the schema
    names the members. It puts another member where the text fails, as long as that leads further.
    """
    given = write(value, separators).text
    orders = [value, *(ranked(value, ranks(schema, keyword)) for keyword in ("properties", "required"))]
    starts = {
        write(start, separators).text: start for order in orders for start in (order, whole_numbers(order))
    }
    for start in starts.values():
        text = _climb(start, separators, tries, reach)
        if text is not None:
            return text, text == given
    return None, False


def _climb(value: Any, separators: tuple[str, str], tries: int, reach: Callable[[str], int]) -> str | None:
    written = write(value, separators)
    best = reach(written.text)
    while best <= written.length:
        better = None
        for other in _reordered(value, written, best):
            tries -= 1
            if tries < 0:
                return None
            reached = reach(write(other, separators).text)
            if reached > best:
                best, better = reached, other
        if better is None:
            return None
        value, written = better, write(better, separators)
    return written.text


def _reordered(value: Any, written: Written, failed: int) -> list[Any]:
    """The value with another member in the place of each one that holds or follows the failing character, and
    with that one in another place before."""
    holding = [(path, i) for start, path, i in written.members if start <= failed]
    innermost: dict[tuple[str | int, ...], int] = dict(holding)
    found = []
    for path, i in list(innermost.items())[::-1]:
        names = list(_at(value, path))
        for j in range(i + 1, len(names)):
            order = [*names[:i], names[j], *names[i:j], *names[j + 1 :]]
            found.append(_replaced(value, path, order))
        for j in range(i):
            order = [*names[:j], names[i], *names[j:i], *names[i + 1 :]]
            found.append(_replaced(value, path, order))
    return found


def _at(value: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _replaced(value: Any, path: tuple[str | int, ...], order: list[str]) -> Any:
    if not path:
        return {name: value[name] for name in order}
    if isinstance(value, dict):
        return {
            name: _replaced(inner, path[1:], order) if name == path[0] else inner
            for name, inner in value.items()
        }
    return [_replaced(inner, path[1:], order) if i == path[0] else inner for i, inner in enumerate(value)]
