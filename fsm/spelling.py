"""Which characters a vocabulary can write.

A vocabulary may lack bytes. A constraint that can go on only through what cannot be written is a dead end,
so such characters are taken out of a pattern's alphabet before its automaton is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from trellis.fsm.charset import EVERYTHING, Ranges, from_flags
from trellis.fsm.contract import Vocabulary
from trellis.fsm.trie import trie_of

_Flags = npt.NDArray[np.bool_]
_Codes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Spelling:
    """alphabet: characters whose UTF-8 can be put together from tokens that lie inside them.
    bytewise: each byte of those characters is a token of its own, so any prefix of one can be completed."""

    alphabet: Ranges
    bytewise: bool


@lru_cache(maxsize=8)
def spelling_of(vocabulary: Vocabulary) -> Spelling:
    """Measured once for each vocabulary object."""
    singles = trie_of(vocabulary).singles
    if singles.issuperset(set(range(0xF5)) - {0xC0, 0xC1}):
        return Spelling(EVERYTHING, True)
    alone: _Flags = np.array([b in singles for b in range(256)])
    needed = _needed(vocabulary, singles)
    writable, bytewise = np.zeros(0x110000, np.bool_), True
    for length, (lo, hi) in enumerate([(0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF)], 1):
        data = _utf8(np.arange(lo, hi + 1), length)
        # reach[n]: the first n bytes can be written.
        reach: list[_Flags] = [np.ones(hi + 1 - lo, np.bool_)]
        for end in range(1, length + 1):
            ways = reach[end - 1] & alone[data[:, end - 1]]
            for begin in range(end - 1):
                words = needed[end - begin]
                if len(words):
                    ways |= reach[begin] & np.isin(_number(data[:, begin:end]), words)
            reach.append(ways)
        writable[lo : hi + 1] = reach[length]
        bytewise = bytewise and bool(alone[data[reach[length]]].all())
    return Spelling(from_flags(writable), bytewise)


def _needed(vocabulary: Vocabulary, singles: frozenset[int]) -> list[_Codes]:
    """For each length up to 4: the tokens that single bytes cannot replace, each as one number."""
    words: list[set[int]] = [set() for _ in range(5)]
    for data in trie_of(vocabulary).data:
        if 1 < len(data) <= 4 and not singles.issuperset(data):
            words[len(data)].add(int.from_bytes(data, "big"))
    return [np.array(sorted(found), np.int64) for found in words]


def _utf8(codes: _Codes, length: int) -> _Codes:
    """int64 [codes, length]: the bytes of each code point, all of one length."""
    columns = [0x80 | (codes >> 6 * i & 0x3F) for i in range(length - 1)]
    lead = {1: 0, 2: 0xC0, 3: 0xE0, 4: 0xF0}[length]
    columns.append(lead | codes >> 6 * (length - 1))
    return np.stack(columns[::-1], axis=1)


def _number(data: _Codes) -> _Codes:
    total = np.zeros(len(data), np.int64)
    for column in data.T:
        total = total << 8 | column
    return total


def writable(alphabet: Ranges, text: str) -> bool:
    """Is every character of the text in the alphabet?"""
    starts = np.array([lo for lo, _ in alphabet], np.int64)
    ends = np.array([hi for _, hi in alphabet], np.int64)
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.int64)
    if not len(codes):
        return True
    if not len(starts):
        return False
    at = np.searchsorted(starts, codes, side="right") - 1
    return bool(((at >= 0) & (codes <= ends[at])).all())
