"""Sets of characters, against Python's own matcher on every character there is."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis.fsm.charset import EVERYTHING, complement, from_flags, intersect, normalize, size, union
from trellis.fsm.limits import Limits
from trellis.fsm.regex import Regex
from trellis.fsm.syntax import Builder, Chars
from trellis.fsm.utf8 import Partition, Utf8Tree

codes = st.integers(0, 0x10FFFF)
ranges = st.lists(st.tuples(codes, codes).map(lambda p: (min(p), max(p))), max_size=6).map(normalize)
small = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)).map(lambda p: (p[0], p[0] + p[1]))).map(
    normalize
)


def members(a: tuple[tuple[int, int], ...]) -> set[int]:
    return {code for lo, hi in a for code in range(lo, hi + 1)}


@settings(deadline=None)
@given(a=small, b=small)
def test_set_operations_are_those_of_sets(a, b) -> None:
    assert members(union([a, b])) == members(a) | members(b)
    assert members(intersect(a, b)) == members(a) & members(b)
    assert size(a) == len(members(a))
    assert intersect(complement(a), a) == ()


@settings(deadline=None)
@given(a=ranges)
def test_complement_is_exact_and_knows_no_surrogates(a) -> None:
    assert complement(complement(a)) == a
    assert union([a, complement(a)]) == EVERYTHING
    assert size(EVERYTHING) == 0x110000 - 0x800


@pytest.mark.parametrize(
    "source",
    [
        r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"(?a)\w", r"(?a)\D", r".", r"(?s).", r"[^\n]", r"[^\W\d_]",
        r"(?i)[a-z]", r"(?i)k", r"(?i)[^k-s]", r"(?i)ß", r"(?i)[À-ÿ]", r"(?i)İ", r"(?i)[α-ω]", r"(?ai)[k-s]",
        r"(?i)[\x00-\u2e7f]", r"(?i)[^\d\x00]", r"(?i)\u1c80", r"(?i)[\U00010400-\U00010420]", r"[\]\-^]",
    ],
)  # fmt: skip
def test_a_class_has_the_characters_that_re_says(source: str) -> None:
    node = Regex(source, Limits()).tree(Builder())
    assert isinstance(node, Chars)
    found = set()
    for lo, hi in EVERYTHING:
        text = "".join(map(chr, range(lo, hi + 1)))
        found.update(lo + m.start() for m in re.compile(source).finditer(text))
    assert members(node.ranges) == found


@settings(deadline=None, max_examples=60)
@given(sets=st.lists(ranges, min_size=1, max_size=4), extra=st.lists(codes, max_size=20))
def test_the_utf8_tree_spells_each_class(sets, extra) -> None:
    """Every character's bytes lead through the tree to the class that says which sets hold it."""
    partition = Partition.of(sets)
    tree = Utf8Tree(partition)
    edges = [code for a in sets for lo, hi in a for code in (lo - 1, lo, hi, hi + 1)]
    for code in {*edges, *extra}:
        if not 0 <= code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            continue
        node, cls = 0, tree.count
        for byte in chr(code).encode():
            column = tree.byte_class[byte]
            cls = int(tree.leaf[node, column])
            following = [child for columns, child in tree.children[node] if column in columns]
            if not following:
                break
            node = following[0]
        holders = [a for a in sets if any(lo <= code <= hi for lo, hi in a)]
        assert holders == [a for a in sets if cls in partition.members[a]]
        assert (cls == tree.count) == (not holders)


def test_flags_to_ranges() -> None:
    flags = np.zeros(0x110000, np.bool_)
    flags[[0, 1, 5, 0xD7FF, 0xD800, 0xE000, 0x10FFFF]] = True
    assert from_flags(flags) == ((0, 1), (5, 5), (0xD7FF, 0xD7FF), (0xE000, 0xE000), (0x10FFFF, 0x10FFFF))
