"""A regular expression's syntax tree, or a list of options, written as a Lark grammar of one terminal.

So engines that read Lark get Python's meaning of a pattern: classes, flags and anchors are already resolved.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from trellis.errors import ConstraintError
from trellis.fsm.charset import Ranges
from trellis.fsm.syntax import INF, Alt, Cat, Chars, Node, Rep

_MAX_CHARACTERS = 1 << 20


def pattern_grammar(root: Node) -> str:
    """``start: TEXT`` and the terminals it is made of; each set of characters is one. Raises ConstraintError."""
    writer = _Writer()
    body = writer.write(root)
    sets = "".join(f"\n{name}: /{_class(ranges)}/" for ranges, name in writer.sets.items())
    return f"start: TEXT\nTEXT: {body}{sets}\n"


def options_grammar(options: Iterable[str]) -> str:
    return f"start: TEXT\nTEXT: {' | '.join(map(_literal, options))}\n"


class _Writer:
    def __init__(self) -> None:
        self.sets: dict[Ranges, str] = {}
        self._written = 0

    def write(self, node: Node) -> str:
        text = self._write(node)
        self._written += len(text)
        if self._written > _MAX_CHARACTERS:
            raise ConstraintError(
                "regex", "limit", "", "the pattern is too large for this engine; simplify it"
            )
        return text

    def _write(self, node: Node) -> str:
        if isinstance(node, Chars):
            [(lo, hi), *more] = node.ranges
            return _literal(chr(lo)) if lo == hi and not more else self._set(node.ranges)
        if isinstance(node, Cat):
            return " ".join(self._sequence(node.parts)) if node.parts else '""'
        if isinstance(node, Alt):
            return f"({' | '.join(map(self.write, node.parts))})"
        if isinstance(node, Rep):
            bounds = f"{{{node.lo},{'' if node.hi == INF else node.hi}}}"
            return f"({self.write(node.body)}){bounds}"
        what = type(node).__name__.lower()
        raise ConstraintError("regex", "unsupported", "", f"this engine has no {what} in patterns")

    def _sequence(self, parts: tuple[Node, ...]) -> list[str]:
        """The parts; single characters in a row are one literal."""
        out: list[str] = []
        literal = ""
        for part in parts:
            if isinstance(part, Chars) and len(part.ranges) == 1 and part.ranges[0][0] == part.ranges[0][1]:
                literal += chr(part.ranges[0][0])
                continue
            if literal:
                out.append(_literal(literal))
                literal = ""
            out.append(self.write(part))
        return [*out, _literal(literal)] if literal else out

    def _set(self, ranges: Ranges) -> str:
        return self.sets.setdefault(ranges, f"SET{len(self.sets)}")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _class(ranges: Ranges) -> str:
    return "[" + "".join(rf"\x{{{lo:x}}}-\x{{{hi:x}}}" for lo, hi in ranges) + "]"
