"""The answer of ``GET /cache/tree`` as a tree of lines, which the text, the SVG and the HTML all draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TEXT_WIDTH = 72  # characters of an edge that are shown
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\"}


@dataclass
class Line:
    """One node. text: of its edge, safe to print, or None where it is secret. more: children not shown."""

    length: int
    hits: int
    locks: int
    idle_s: float
    age_s: float
    text: str | None
    more: int
    children: list[Line] = field(default_factory=list)

    @property
    def facts(self) -> str:
        """Everything but the text."""
        parts = [f"{self.length} tok", _some(self.hits, "hit"), f"idle {ago(self.idle_s)}"]
        return " · ".join([*parts, f"{self.locks} in use"] if self.locks else parts)

    @property
    def quoted(self) -> str:
        """The text between quotes, or why there is none."""
        return "(secret)" if self.text is None else f'"{self.text}"'


@dataclass
class Tree:
    """heading: sizes of the whole cache. namespaces: by label, what stands at the top of each. left_out: nodes
    of the cache that are not shown."""

    heading: str
    namespaces: dict[str, list[Line]]
    left_out: int
    count: int


def read_tree(answer: Mapping[str, Any]) -> Tree:
    """Raises KeyError or TypeError if this is not the answer of ``/cache/tree``."""
    lines: dict[int, Line] = {}
    namespaces: dict[str, list[Line]] = {}
    for node in answer["shown"]:
        line = lines[node["id"]] = Line(
            node["length"],
            node["hits"],
            node["locks"],
            node["idle_s"],
            node["age_s"],
            _edge_text(node),
            node["children"],
        )
        if node["parent"] is None:
            namespaces.setdefault(printable(node["namespace"]), []).append(line)
        else:
            parent = lines[node["parent"]]
            parent.children.append(line)
            parent.more -= 1
    heading = (
        f"{_some(answer['nodes'], 'node')}, {_some(answer['tokens'], 'token')} ({answer['protected_tokens']:,} in use), "
        f"{_some(answer['namespaces'], 'namespace')}; {answer['policy']}, pages of {answer['page_size']:,}"
    )
    return Tree(printable(heading), namespaces, max(0, answer["nodes"] - len(lines)), len(lines))


def title(namespace: str) -> str:
    return f"namespace #{namespace}" if namespace else "without a namespace"


def printable(text: str) -> str:
    """The text with everything escaped that a terminal or a page would act on: controls, bidi marks, newlines."""
    return "".join(_SHORT.get(c) or (c if c.isprintable() else _escape(c)) for c in text)


def ago(seconds: float) -> str:
    """A duration in two or three characters and a unit."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _some(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _edge_text(node: Mapping[str, Any]) -> str | None:
    """Shortened to ``TEXT_WIDTH``; "…" also stands for the tokens that the server left out."""
    if node["text"] is None:
        return None
    text = printable(node["text"])
    complete = len(text) <= TEXT_WIDTH and len(node["token_ids"]) == node["length"]
    return text if complete else text[: TEXT_WIDTH - 1] + "…"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
