"""Sets of characters as sorted ranges of code points, and the classes that Python's ``re`` knows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

Ranges = tuple[tuple[int, int], ...]
"""Inclusive code point ranges: sorted, disjoint, not adjacent."""

# Surrogates are no characters: UTF-8 cannot carry them, so no text of a model has one.
EVERYTHING: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))

# Letters with case live below this; the planes above hold ideographs, tags and private use.
_CASED_END = 0x20000


def normalize(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Sort and join overlapping or adjacent ranges, and leave out surrogates."""
    out: list[tuple[int, int]] = []
    for lo, hi in sorted(pairs):
        if out and lo <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(hi, out[-1][1]))
        else:
            out.append((lo, hi))
    if any(lo <= 0xDFFF and hi >= 0xD800 for lo, hi in out):
        return intersect(tuple(out), EVERYTHING)
    return tuple(out)


def union(sets: Iterable[Ranges]) -> Ranges:
    return normalize(pair for ranges in sets for pair in ranges)


@lru_cache(maxsize=1024)
def intersect(a: Ranges, b: Ranges) -> Ranges:
    out: list[tuple[int, int]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        lo, hi = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if lo <= hi:
            out.append((lo, hi))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(out)


def complement(a: Ranges) -> Ranges:
    out: list[tuple[int, int]] = []
    start = 0
    for lo, hi in a:
        if start < lo:
            out.append((start, lo - 1))
        start = hi + 1
    if start <= 0x10FFFF:
        out.append((start, 0x10FFFF))
    return intersect(tuple(out), EVERYTHING)


def single(code: int) -> Ranges:
    return normalize([(code, code)])


def size(a: Ranges) -> int:
    return sum(hi - lo + 1 for lo, hi in a)


def from_flags(member: np.ndarray) -> Ranges:
    """bool [0x110000] to ranges."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], member.view(np.int8), [0]))))
    return intersect(tuple((int(lo), int(hi) - 1) for lo, hi in edges.reshape(-1, 2)), EVERYTHING)


@lru_cache(maxsize=16)
def category(letter: str, ascii_only: bool) -> Ranges:
    r"""The set of ``\d``, ``\w``, ``\s`` and their capitals, as this Python's ``re`` defines them."""
    if letter.isupper():
        return complement(category(letter.lower(), ascii_only))
    find = re.compile(rf"\{letter}+", re.ASCII if ascii_only else 0).finditer
    out: list[tuple[int, int]] = []
    for lo, hi in EVERYTHING:
        text = np.arange(lo, hi + 1, dtype="<u4").tobytes().decode("utf-32-le")
        out += [(lo + m.start(), lo + m.end() - 1) for m in find(text)]
    return normalize(out)


@lru_cache(maxsize=1)
def _cased() -> tuple[str, Ranges]:
    """Every character that takes part in case folding, as text and as a set."""
    found: set[int] = set()
    for code in range(_CASED_END):
        char = chr(code)
        lower = char.lower()
        if lower != char or char.upper() != char:
            found.add(code)
            found.update(map(ord, lower))
    return "".join(map(chr, sorted(found))), normalize((c, c) for c in found)


@lru_cache(maxsize=256)
def ignore_case(plain: Ranges, source: str, ascii_only: bool) -> Ranges:
    """The set that a class means under IGNORECASE.

    plain: its meaning without the flag. source: the class as regex text. Python's own matcher decides for
    every character that has case, so its rules (and its exceptions) need no second implementation here.
    """
    text, cased = _cased()
    flags = re.IGNORECASE | (re.ASCII if ascii_only else 0)
    hits = re.compile(source, flags).findall(text)
    return union([intersect(plain, complement(cased)), normalize((ord(c), ord(c)) for c in hits)])
