"""Lark grammars as users write them: what is refused before llguidance reads them.

llguidance knows more than grammars: special tokens, sampling parameters of rules. What would break a promise
(no special token inside a constrained text, the constraint alone decides what is allowed) is refused by name,
and so is a rule that no finite text satisfies: the model could enter it and never come out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from trellis.errors import ConstraintError
from trellis.fsm.limits import Limits

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|(?://|\#)[^\n]*)
    |(?P<newline>\n)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)
    |(?P<open>["/][^\n]*)
    |(?P<special><[^<>\n]*>)
    |(?P<directive>%[A-Za-z_]+)
    |(?P<name>[?!]?[A-Za-z_][A-Za-z0-9_-]*(?:\.[A-Za-z_][A-Za-z0-9_-]*)*)
    |(?P<number>-?\d+)
    |(?P<op>->|\.\.|.)""",
    re.VERBOSE,
)
_Atom = str | int
_JSON = re.compile(r"%json\s*\{")
_BRACE = re.compile(
    r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}]', re.DOTALL
)  # a string that is not closed ends with the text
_BLANKS = re.compile(r"\s*")
_REFUSED_ATTRIBUTES = {
    "max_tokens": "the length of a text is set by the request",
    "temperature": "the temperature is set by the request",
}


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    at: int


def check_lark(source: str, limits: Limits) -> list[tuple[int, int]]:
    """Where the grammar holds JSON schemas: (begin, end) of each ``%json {...}``. Raises ConstraintError (``syntax``, ``unsupported``, ``limit``, ``empty``). Other mistakes are llguidance's
    to find."""
    try:
        size = len(source.encode())
    except UnicodeEncodeError as error:
        reason = "holds a lone surrogate, which UTF-8 text cannot carry"
        raise _refuse("syntax", source, error.start, reason) from None
    if size > limits.grammar_bytes:
        raise ConstraintError(
            "grammar", "limit", "", f"has {size} bytes; at most {limits.grammar_bytes} are allowed"
        )
    tokens = list(_scan(source))
    _check_tokens(source, tokens, limits.nesting)
    rules = _rules(tokens)
    endless = _endless(rules)
    if endless:
        at = rules[endless[0]].at
        raise _refuse("empty", source, at, f"no finite text satisfies the rule {endless[0]!r}")
    schemas = [token for token in tokens if token.kind == "directive" and _JSON.match(token.text)]
    return [(token.at, token.at + len(token.text)) for token in schemas]


def _scan(source: str) -> Iterator[_Token]:
    """Tokens without blanks and comments; what stands in the braces of a directive is one token."""
    at = 0
    while at < len(source):
        found = _TOKEN.match(source, at)
        assert found is not None, "every character is a token"
        kind, text = str(found.lastgroup), found.group()
        if (
            kind == "open"
        ):  # going on behind the quote would read the rest of the line once more for each later one
            what = "string" if text[0] == '"' else "regular expression"
            raise _refuse("syntax", source, at, f"the {what} that begins here is not closed on its line")
        if kind == "directive":
            end = _braces(source, found.end())
            yield _Token(kind, source[at:end], at)
            at = end
            continue
        if kind != "skip":
            yield _Token(kind, text, at)
        at = found.end()


def _braces(source: str, at: int) -> int:
    """The end of ``{...}`` that begins here, after blanks; ``at`` if none does."""
    begin = _BLANKS.match(source, at)
    assert begin is not None
    if not source.startswith("{", begin.end()):
        return at
    depth = 0
    for found in _BRACE.finditer(source, begin.end()):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth == 0:
            return found.end()
    return len(source)


def _check_tokens(source: str, tokens: list[_Token], nesting: int) -> None:
    depth = 0
    for token in tokens:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(token.text, 0)
        if depth > nesting:
            raise _refuse("limit", source, token.at, f"is nested more than {nesting} deep")
        if token.kind == "special":
            reason = (
                f"{token.text} is a special token, which no constrained text may hold; write text as a string"
            )
            raise _refuse("unsupported", source, token.at, reason)
        if token.kind == "directive" and '"allow_invalid_utf8"' in token.text:
            raise _refuse("unsupported", source, token.at, "allow_invalid_utf8: texts are always UTF-8")
    for name, following in pairwise(tokens):
        if name.text in _REFUSED_ATTRIBUTES and following.text == "=":
            reason = f"{name.text}: {_REFUSED_ATTRIBUTES[name.text]}"
            raise _refuse("unsupported", source, name.at, reason)


@dataclass(frozen=True)
class _Rule:
    """A definition: where it stands and its right side."""

    at: int
    body: list[_Token]


def _rules(tokens: list[_Token]) -> dict[str, _Rule]:
    """The definitions ``name: body`` and ``name[attributes]: body``, by name."""
    rules: dict[str, _Rule] = {}
    body: list[_Token] = []
    i, at_line_start = 0, True
    while i < len(tokens):
        token = tokens[i]
        colon = _colon_after_name(tokens, i) if at_line_start and token.kind == "name" else 0
        if colon:
            body = []
            rules[token.text.lstrip("?!")] = _Rule(token.at, body)
            i = colon
        elif at_line_start and token.kind == "directive":
            body = []  # a statement of its own; what follows in its line belongs to no rule
        elif token.kind != "newline":
            body.append(token)
        at_line_start = token.kind == "newline"
        i += 1
    return rules


def _colon_after_name(tokens: list[_Token], at: int) -> int:
    """The place of the ``:`` if a definition begins at this name, else 0."""
    at += 1
    if at < len(tokens) and tokens[at].text == "[":
        while at < len(tokens) and tokens[at].text != "]":
            at += 1
        at += 1
    return at if at < len(tokens) and tokens[at].text == ":" else 0


def _endless(rules: dict[str, _Rule]) -> list[str]:
    """Names of the rules that no finite text satisfies.

    A right side is read once, into clauses "this can be a finite text if all of those can"; what follows from
    them is found in time linear in their size.
    """
    reader = _Clauses(set(rules))
    for name, rule in rules.items():
        reader.read(name, rule.body)
    finite = reader.facts()
    return [name for name in rules if name not in finite]


class _Clauses:
    """Clauses over the names of rules, and over numbers for what stands in parentheses.

    Names that are defined elsewhere, and whatever is not understood, need nothing: llguidance decides.
    """

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self._heads: list[_Atom] = []
        self._missing: list[int] = []  # for each clause: how many of its needs are not known to be finite
        self._users: dict[_Atom, list[int]] = {}
        self._groups = 0
        self._body: list[_Token] = []
        self._at = 0

    def read(self, name: str, body: list[_Token]) -> None:
        self._body, self._at = body, 0
        self._alternatives(name)

    def facts(self) -> set[_Atom]:
        """Everything that can be a finite text."""
        known: set[_Atom] = set()
        fresh = [head for head, missing in zip(self._heads, self._missing, strict=True) if not missing]
        while fresh:
            atom = fresh.pop()
            if atom in known:
                continue
            known.add(atom)
            for clause in self._users.get(atom, ()):
                self._missing[clause] -= 1
                if not self._missing[clause]:
                    fresh.append(self._heads[clause])
        return known

    def _alternatives(self, head: _Atom) -> None:
        self._sequence(head)
        while self._peek() == "|":
            self._at += 1
            self._sequence(head)

    def _sequence(self, head: _Atom) -> None:
        needs: list[_Atom] = []
        while self._at < len(self._body) and self._peek() not in ("|", ")", "]"):
            needs += self._item()
        for need in needs:
            self._users.setdefault(need, []).append(len(self._heads))
        self._heads.append(head)
        self._missing.append(len(needs))

    def _item(self) -> list[_Atom]:
        """What one part of a sequence needs."""
        token = self._body[self._at]
        self._at += 1
        if token.text == "->":
            self._at += 1  # the name of the alternative
            return []
        need: _Atom = token.text if token.kind == "name" and token.text in self._names else 0
        if token.text in ("(", "["):
            self._groups += 1
            group = self._groups
            self._alternatives(group)
            self._at += 1
            need = group if token.text == "(" else 0
        return [] if self._may_be_left_out() or not need else [need]

    def _may_be_left_out(self) -> bool:
        """Reads the quantifier, if one follows."""
        quantifier = self._peek()
        if quantifier in ("*", "?", "+"):
            self._at += 1
            return quantifier != "+"
        if quantifier == "{":
            at = self._at + 1
            while self._peek() not in ("}", ""):
                self._at += 1
            self._at += 1
            return at < len(self._body) and self._body[at].text in ("0", ",")
        if quantifier == "~" and self._at + 1 < len(self._body) and self._body[self._at + 1].kind == "number":
            low = self._body[self._at + 1].text
            self._at += 2
            if self._peek() == "..":
                self._at += 2
            return low == "0"
        return False

    def _peek(self) -> str:
        return self._body[self._at].text if self._at < len(self._body) else ""


def place_in(source: str, at: int) -> str:
    line = source.count("\n", 0, at) + 1
    return f"line {line}, column {at - source.rfind(chr(10), 0, at)}"


def _refuse(code: str, source: str, at: int, reason: str) -> ConstraintError:
    return ConstraintError("grammar", code, place_in(source, at), reason)
