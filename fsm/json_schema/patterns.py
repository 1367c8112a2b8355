"""Patterns of JSON schema (ECMA-262) in a form that Python's ``re`` and llguidance read alike.

``\\d`` and ``\\w`` are ASCII, ``\\s`` is Unicode, ``$`` is the very end; every character that means something
special in one of the two dialects is escaped. The result is Python's form, whose end anchor is ``\\Z``.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import lru_cache

_SPACES = [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
_SPACES += [(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
Ranges = list[tuple[int, int]]
_CLASSES: dict[str, Ranges] = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": _SPACES,
}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_CATEGORIES = {
    "Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Number": "N", "Decimal_Number": "Nd",
    "digit": "Nd", "Punctuation": "P", "punct": "P", "Symbol": "S", "Separator": "Z",
    "Space_Separator": "Zs", "Other": "C", "Control": "Cc", "cntrl": "Cc",
}  # fmt: skip
_QUANTIFIER = re.compile(r"\{\d+(?:,\d*)?\}")
_SURROGATES = range(0xD800, 0xE000)


class PatternError(ValueError):
    """What is wrong with a pattern, and where. unsupported: it is a pattern, but not a regular one."""

    def __init__(self, position: int, reason: str, unsupported: bool = False) -> None:
        super().__init__(f"position {position} of the pattern: {reason}")
        self.unsupported = unsupported


def translate(pattern: str) -> str:
    """Raises PatternError."""
    translation = _Translator(pattern).run()
    try:
        re.compile(translation)
    except (
        re.error,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:  # ValueError: a bound of many digits
        raise PatternError(getattr(error, "pos", 0) or 0, str(error)) from None
    return translation


def for_llguidance(translation: str) -> str:
    """The same pattern in the syntax of Rust's regex crate."""
    return re.sub(r"\\(.)", lambda m: "$" if m[1] == "Z" else m[0], translation, flags=re.DOTALL)


def literal(character: str) -> str:
    """One character, outside or inside of a class."""
    code = ord(character)
    if code < 0x20 or code == 0x7F:
        return f"\\x{code:02x}"
    return f"\\{character}" if character in "\\.+*?()|[]{}^$-&~#" else character


def exactly(texts: list[str]) -> str:
    """A pattern for these texts and no others."""
    return rf"^(?:{'|'.join(''.join(map(literal, text)) for text in texts)})\Z"


class _Translator:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def run(self) -> str:
        out: list[str] = []
        while self._at < len(self._text):
            out.append(self._item())
        return "".join(out)

    def _item(self) -> str:
        start, character = self._at, self._text[self._at]
        self._at += 1
        if character == "\\":
            return self._escape()
        if character == "[":
            return self._class()
        if character == "(":
            return self._group()
        if character == "$":
            return r"\Z"
        if character == "{":
            quantifier = _QUANTIFIER.match(self._text, start)
            if quantifier is None:
                return r"\{"
            self._at = quantifier.end()
            return quantifier[0] + self._lazy()
        if character in "*+?":
            return character + self._lazy()
        return character if character in ".^|)" else literal(character)

    def _lazy(self) -> str:
        """Lazy or not, the language is the same. A ``+`` here would mean something else in Python."""
        following = self._text[self._at : self._at + 1]
        if following == "?":
            self._at += 1
            following = self._text[self._at : self._at + 1]
        if following and following in "*+?":
            raise PatternError(self._at, "nothing to repeat")
        return ""

    def _group(self) -> str:
        start = self._at - 1
        for opening, closing in (("?:", ""), ("?P<", ">"), ("?<", ">")):
            if self._text.startswith(opening, self._at) and self._text[self._at : self._at + 3] not in (
                "?<=",
                "?<!",
            ):
                end = self._text.find(closing, self._at + 2) + 1 if closing else self._at + 2
                if end == 0:
                    break
                self._at = end
                return "(?:"
        if self._text.startswith("?i)", self._at) and start == 0:
            self._at += 3
            return "(?i)"
        if self._text.startswith("?", self._at):
            raise PatternError(start, "look-around and flags are not supported", unsupported=True)
        return "(?:"

    def _escape(self) -> str:
        start = self._at - 1
        found = self._escaped()
        if isinstance(found, str):
            return literal(found)
        if found is None:
            raise PatternError(start, f"'\\{self._text[start + 1]}' is not supported", unsupported=True)
        return f"[{_ranges(found)}]"

    def _escaped(self) -> str | Ranges | None:
        """What the escape stands for: a character, a class, or None if it is neither."""
        if self._at == len(self._text):
            raise PatternError(self._at - 1, "a lone backslash")
        character = self._text[self._at]
        self._at += 1
        if character.lower() in _CLASSES:
            ranges = _CLASSES[character.lower()]
            return _complement(ranges) if character.isupper() else ranges
        if character in "pP" and self._text.startswith("{", self._at):
            return self._category(negated=character == "P")
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character == "x":
            return self._code(2)
        if character == "u":
            return self._unicode()
        if character == "c" and self._text[self._at : self._at + 1].isalpha():
            self._at += 1
            return chr(ord(self._text[self._at - 1]) % 32)
        if character == "0" and not self._text[self._at : self._at + 1].isdigit():
            return "\0"
        return None if character.isalnum() else character

    def _code(self, digits: int) -> str:
        text = self._text[self._at : self._at + digits]
        if not re.fullmatch(f"[0-9a-fA-F]{{{digits}}}", text):
            raise PatternError(self._at, f"{digits} hexadecimal digits must follow")
        self._at += digits
        return chr(int(text, 16))

    def _unicode(self) -> str:
        start = self._at
        if self._text.startswith("{", start):
            end = self._text.find("}", start)
            try:
                character = chr(int(self._text[start + 1 : end], 16))
            except (ValueError, OverflowError):
                raise PatternError(start, "not a character") from None
            self._at = end + 1
        else:
            character = self._code(4)
            if 0xD800 <= ord(character) < 0xDC00 and self._text.startswith("\\u", self._at):
                self._at += 2
                low = ord(self._code(4))
                if 0xDC00 <= low < 0xE000:
                    character = chr(0x10000 + ((ord(character) - 0xD800) << 10) + (low - 0xDC00))
        if ord(character) in _SURROGATES:
            raise PatternError(start, "a lone surrogate is not a character")
        return character

    def _category(self, negated: bool) -> Ranges:
        end = self._text.find("}", self._at)
        name = self._text[self._at + 1 : end].removeprefix("General_Category=").removeprefix("gc=")
        ranges = _category_ranges(_CATEGORIES.get(name, name))
        if end < 0 or not ranges:
            raise PatternError(self._at, f"unknown character category {name!r}", unsupported=True)
        self._at = end + 1
        return _complement(ranges) if negated else ranges

    def _class(self) -> str:
        start = self._at - 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        parts: list[str] = []
        while True:
            if self._at >= len(self._text):
                raise PatternError(start, "'[' is not closed")
            if self._text[self._at] == "]":
                break
            parts.append(self._class_item())
        self._at += 1
        if not parts:
            if negated:
                return f"[{_ranges([(0, sys.maxunicode)])}]"
            raise PatternError(start, "an empty class matches nothing", unsupported=True)
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _class_item(self) -> str:
        start = self._at
        low = self._class_atom()
        if not isinstance(low, str):
            return _ranges(low)
        if not self._text.startswith("-", self._at) or self._text[self._at + 1 : self._at + 2] in ("]", ""):
            return literal(low)
        self._at += 1
        high = self._class_atom()
        if not isinstance(high, str):
            return literal(low) + r"\-" + _ranges(high)
        if high < low:
            raise PatternError(start, "the range is in reverse order")
        return f"{literal(low)}-{literal(high)}"

    def _class_atom(self) -> str | Ranges:
        start, character = self._at, self._text[self._at]
        self._at += 1
        if character != "\\":
            return character
        if self._text.startswith("b", self._at):
            self._at += 1
            return "\b"
        found = self._escaped()
        if found is None:
            raise PatternError(start, f"'\\{self._text[start + 1]}' is not supported", unsupported=True)
        return found


def _ranges(ranges: Ranges) -> str:
    spelled = [
        literal(chr(low)) if low == high else f"{literal(chr(low))}-{literal(chr(high))}"
        for low, high in ranges
    ]
    return "".join(spelled)


def _complement(ranges: Ranges) -> Ranges:
    """Surrogates are in no text, and are left out."""
    gaps, after = [], 0
    for low, high in [*sorted([*ranges, (0xD800, 0xDFFF)]), (sys.maxunicode + 1, 0)]:
        if low > after:
            gaps.append((after, low - 1))
        after = max(after, high + 1)
    return gaps


@lru_cache(maxsize=32)
def _category_ranges(category: str) -> Ranges:
    """Code points whose general category begins so, e.g. ``L`` or ``Lu``."""
    if not re.fullmatch("[LMNPSZC][a-z]?", category):
        return []
    ranges: Ranges = []
    for code in range(sys.maxunicode + 1):
        if code not in _SURROGATES and unicodedata.category(chr(code)).startswith(category):
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1] = (ranges[-1][0], code)
            else:
                ranges.append((code, code))
    return ranges
