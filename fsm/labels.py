"""Sets of bytes and characters as a reader writes them: ``[0-9a-f]``, ``\\w``, ``"name"``."""

from __future__ import annotations

from collections.abc import Iterable

from trellis.fsm.charset import (
    EVERYTHING,
    Ranges,
    category,
    complement,
    intersect,
    normalize,
    single,
    size,
)

_ESCAPES = {0x09: r"\t", 0x0A: r"\n", 0x0D: r"\r", 0x20: "␣"}
_MANY, _FEW = 20, 8  # ranges
_SPECIAL = frozenset(map(ord, "\\[]^-"))


def characters(ranges: Ranges, longest: int = 40) -> str:
    """A set of characters: one character, a class that ``re`` has a name for, or a class in brackets.

    longest: characters of the label; what is cut off is counted.
    """
    if size(ranges) == 1:
        return quoted(chr(ranges[0][0]))
    names = _names()
    if (name := names.get(ranges)) is not None:
        return name
    if len(ranges) > _MANY:  # a large set is often one that has a name, but for a few
        for known, name in names.items():
            left_out = intersect(known, complement(ranges))
            if len(left_out) <= _FEW and intersect(ranges, known) == ranges:
                return f"{name} but not {_brackets('', left_out, longest)}"
    others = complement(ranges)
    if size(others) < size(ranges) and len(others) <= len(ranges):
        return _brackets("^", others, longest)
    return _brackets("", ranges, longest)


def quoted(text: str) -> str:
    """Text in quotes, with blanks, controls and what is no character visible."""
    quote = "'" if '"' in text and "'" not in text else '"'
    shown = "".join(
        "\\" + char if char in (quote, "\\") else _one(ord(char), brackets=False) for char in text
    )
    return quote + shown + quote


def octets(values: Iterable[int], longest: int = 40) -> str:
    """A set of bytes: those of ASCII as characters, the others in hexadecimal."""
    found = sorted(values)
    if len(found) == 1:
        byte = found[0]
        return quoted(chr(byte)) if byte < 0x80 else f"byte {byte:02X}"
    runs = normalize((byte, byte) for byte in found)
    parts = [
        (_octet(lo) + "-" + _octet(hi)) if hi > lo + 1 else _octet(lo) + _octet(hi) * (hi > lo)
        for lo, hi in runs
    ]
    return "[" + _cut(parts, longest) + "]"


def _octet(byte: int) -> str:
    return _one(byte, brackets=True) if byte < 0x80 else f"\\x{byte:02X}"


def _names() -> dict[Ranges, str]:
    dot = complement(single(10))
    names = {category(letter, ascii_only=False): f"\\{letter}" for letter in "dswDSW"}
    return {**names, EVERYTHING: "any character", dot: "."}


def _brackets(sign: str, ranges: Ranges, longest: int) -> str:
    parts: list[str] = []
    for lo, hi in ranges:
        low, high = _one(lo, brackets=True), _one(hi, brackets=True)
        parts.append(low if lo == hi else low + high if hi == lo + 1 else f"{low}-{high}")
    return f"[{sign}{_cut(parts, longest)}]"


def _cut(parts: list[str], longest: int) -> str:
    """The parts in a row as far as there is room."""
    kept, length = 0, 0
    while kept < len(parts) and length + len(parts[kept]) <= longest:
        length += len(parts[kept])
        kept += 1
    more = len(parts) - kept
    return "".join(parts[:kept]) + (f" … {more} more" if more else "")


def _one(code: int, brackets: bool) -> str:
    if code in _ESCAPES:
        return _ESCAPES[code]
    char = chr(code)
    if brackets and code in _SPECIAL:
        return "\\" + char
    if char.isprintable():
        return char
    return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
