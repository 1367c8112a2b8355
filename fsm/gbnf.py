"""Grammars in GBNF, the EBNF dialect of llama.cpp: their text to rules.

    root   ::= "(" root ")" | number
    number ::= [0-9]{1,3}   # a comment

A rule goes on until the next ``name ::=``, over as many lines as it likes. ``.`` is any character, ``[^"]``
any but these; both include the newline. Escapes: ``\\n \\r \\t \\\\ \\" \\[ \\] \\- \\^ \\xHH \\uHHHH
\\UHHHHHHHH``, each one character.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trellis.errors import ConstraintError
from trellis.fsm.charset import EVERYTHING, Ranges, complement, normalize, single
from trellis.fsm.limits import Limits

# A comment goes to the end of its line: were it free to end sooner, ##### could be split in 16 ways.
_BLANK = r"(?:[ \t\r\n]|#[^\n]*(?:\n|\Z))*"
_SPACE = re.compile(_BLANK)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_DEFINES = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*" + _BLANK + "::=")
_BOUNDS = re.compile(r"\{\s*(?:([0-9]+)\s*)?(?:(,)\s*(?:([0-9]+)\s*)?)?\}")  # never \s*\s*: linear in blanks
_MOST_DIGITS = 9  # of a bound; what has more is past every limit, and int() refuses thousands of them
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{c: c for c in "\\\"'[]-^/"}}
_FOREIGN = {
    "<": "a token by its name or number (<...>) cannot stand in a constrained text, which is plain characters",
    "!": "a negated token (!) cannot stand in a constrained text, which is plain characters",
    "/": "GBNF has no regular expressions between slashes; use a class in brackets and * + ? {m,n}",
}


@dataclass(frozen=True)
class Chars:
    """One character out of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Ref:
    name: str


@dataclass(frozen=True)
class Seq:
    """One after the other; empty: the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class Alt:
    """One of these; empty: no text at all."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """high: None for no bound."""

    item: Node
    low: int
    high: int | None


Node = Chars | Ref | Seq | Alt | Repeat
EMPTY = Seq(())


def parse(text: str, limits: Limits) -> dict[str, Node]:
    """The rules by name, in the order of the text; there is one called ``root``.

    Raises ConstraintError: ``syntax`` and ``unsupported`` with line and column, or ``limit``.
    """
    return _Parser(text, limits).rules()


def refuse(code: str, where: str, reason: str) -> ConstraintError:
    return ConstraintError("grammar", code, where, reason)


class _Parser:
    """Recursive descent with one character of look-ahead; the depth of groups is bounded."""

    def __init__(self, text: str, limits: Limits) -> None:
        self._text = text
        self._limits = limits
        self._at = 0
        self._depth = 0
        self._uses: dict[str, int] = {}  # where a rule is first used

    def rules(self) -> dict[str, Node]:
        self._check_characters()
        found: dict[str, Node] = {}
        self._space()
        while self._at < len(self._text):
            begin = self._at
            match = _DEFINES.match(self._text, begin)
            if match is None:
                raise self._error('a rule must begin with its name and ::=, as in: root ::= "yes" | "no"')
            name = self._word()
            if name in found:
                raise self._error(f"the rule {name!r} is defined twice; join the two with |", begin)
            self._at = match.end()
            found[name] = self._alternatives()
        if "root" not in found:
            raise refuse("syntax", "", "there must be a rule called root: it is what the whole text is")
        for name, at in self._uses.items():
            if name not in found:
                raise self._error(f"there is no rule called {name!r}", at)
        return found

    def _check_characters(self) -> None:
        for match in re.finditer("[\x00\ud800-\udfff]", self._text):
            what = (
                "a NUL character" if match.group() == "\0" else "a lone surrogate, which UTF-8 cannot carry"
            )
            raise self._error(f"the grammar holds {what}; write the character as an escape", match.start())

    def _alternatives(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while True:
            self._space()
            char = self._peek()
            if char in ("", "|", ")") or _DEFINES.match(self._text, self._at):
                if char == ")" and not self._depth:
                    raise self._error("this ) closes nothing")
                break
            items.append(self._repeated(self._atom(char)))
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def _atom(self, char: str) -> Node:
        if char == '"':
            return self._literal()
        if char == "[":
            return self._class()
        if char == "(":
            return self._group()
        if char == ".":
            self._at += 1
            return Chars(EVERYTHING)
        if _NAME.match(self._text, self._at):
            begin = self._at
            name = self._word()
            self._uses.setdefault(name, begin)
            return Ref(name)
        if char in _FOREIGN:
            raise refuse("unsupported", self._place(self._at), _FOREIGN[char])
        raise self._error(f"{char!r} cannot stand here")

    def _group(self) -> Node:
        begin = self._at
        self._at += 1
        self._depth += 1
        if self._depth > self._limits.nesting:
            reason = f"groups are nested more than {self._limits.nesting} deep"
            raise refuse("limit", self._place(begin), reason)
        if self._peek() == "=":
            raise refuse("unsupported", self._place(begin), "look-ahead (= ...) is not supported")
        inner = self._alternatives()
        if not self._take(")"):
            raise self._error("this ( is never closed", begin)
        self._depth -= 1
        return inner

    def _repeated(self, item: Node) -> Node:
        while True:
            self._space()
            char = self._peek()
            if char in ("*", "+", "?"):
                self._at += 1
                item = Repeat(item, int(char == "+"), 1 if char == "?" else None)
            elif char == "{":
                item = self._bounded(item)
            else:
                return item

    def _bounded(self, item: Node) -> Node:
        match = _BOUNDS.match(self._text, self._at)
        if match is None or not (match[1] or match[3]):
            raise self._error("a repeat must be {m}, {m,}, {,n} or {m,n}")
        first, last = ((bound or "").lstrip("0") for bound in (match[1], match[3]))
        digits = max(len(first), len(last))
        low = int(first or 0) if digits <= _MOST_DIGITS else 0
        if match[3] and digits <= _MOST_DIGITS:
            high: int | None = int(last or 0)
        else:
            high = None if match[2] else low
        if high is not None and high < low:
            raise self._error(f"a repeat of at least {low} and at most {high} is none")
        if digits > _MOST_DIGITS or max(low, high or 0) > self._limits.repeat:
            reason = f"at most {self._limits.repeat} repeats are allowed"
            raise refuse("limit", self._place(self._at), reason)
        self._at = match.end()
        return Repeat(item, low, high)

    def _literal(self) -> Node:
        begin = self._at
        self._at += 1
        chars: list[Node] = []
        while (char := self._peek()) != '"':
            if char in ("", "\n"):
                raise self._error('this " is never closed; a line break inside is written \\n', begin)
            chars.append(Chars(single(self._character())))
        self._at += 1
        return chars[0] if len(chars) == 1 else Seq(tuple(chars))

    def _class(self) -> Node:
        begin = self._at
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        pairs: list[tuple[int, int]] = []
        while (char := self._peek()) != "]":
            if char in ("", "\n"):
                raise self._error("this [ is never closed; a line break inside is written \\n", begin)
            at, low = self._at, self._character()
            high = low
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._character()
            if high < low:
                raise self._error(f"the range {self._text[at : self._at]} is empty: its end comes first", at)
            pairs.append((low, high))
        self._at += 1
        if not pairs and not negated:
            raise self._error("an empty class [] matches nothing", begin)
        ranges = normalize(pairs)
        return Chars(complement(ranges) if negated else ranges)

    def _character(self) -> int:
        """One character of a literal or class, its escape resolved."""
        begin, char = self._at, self._text[self._at]
        self._at += 1
        if char != "\\":
            return ord(char)
        kind = self._peek()
        self._at += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        if kind not in _HEX:
            raise self._error(f"unknown escape \\{kind}; a backslash itself is written \\\\", begin)
        digits = self._text[self._at : self._at + _HEX[kind]]
        self._at += _HEX[kind]
        if not re.fullmatch(rf"[0-9A-Fa-f]{{{_HEX[kind]}}}", digits):
            raise self._error(f"\\{kind} needs {_HEX[kind]} hexadecimal digits", begin)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self._error(f"\\{kind}{digits} is no character: UTF-8 has none of this number", begin)
        return code

    def _word(self) -> str:
        match = _NAME.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return match.group()

    def _space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, char: str) -> bool:
        self._space()
        found = self._peek() == char
        self._at += found
        return found

    def _place(self, at: int) -> str:
        line_start = self._text.rfind("\n", 0, at) + 1
        return f"line {self._text.count(chr(10), 0, at) + 1}, column {at - line_start + 1}"

    def _error(self, reason: str, at: int | None = None) -> ConstraintError:
        return refuse("syntax", self._place(self._at if at is None else at), reason)
