"""The first match of a pattern in text that comes in pieces, against ``re``."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis.errors import ConstraintError
from trellis.fsm.search import MAX_BEGUN, Search, SearchPattern, search_pattern

PATTERNS = [
    "ab+c",
    r"\n\s*\n",
    "[0-9]{2,3}x",
    "and|or|android",
    "é+x",
    ".*b",
    "(a|b)*c",
    "a.c",
    "a+?b*?c",
    "(?i:stop)!",
    r"\.{3}|…",
    r"[^\W\d]{3}",
]
texts = st.text(st.sampled_from("abcx 0é\n1dnorSTOp!.…"), max_size=24)


def by_re(pattern: str, text: str) -> tuple[int, int] | None:
    """(bytes up to the end, bytes of the match) of the match that is complete first, the longest of those."""
    compiled = re.compile(pattern)
    for end in range(1, len(text) + 1):
        for start in range(end):
            if compiled.fullmatch(text, start, end):
                return len(text[:end].encode()), len(text[start:end].encode())
    return None


def pieces(text: str, cuts: list[int]) -> list[bytes]:
    data = text.encode()
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


@settings(max_examples=400)
@given(st.sampled_from(PATTERNS), texts, st.lists(st.integers(0, 60), max_size=6))
def test_the_first_match_is_that_of_re_wherever_the_text_is_cut(
    pattern: str, text: str, cuts: list[int]
) -> None:
    search, read, found = Search(search_pattern(pattern)), 0, None
    for piece in pieces(text, cuts):
        match = search.push(piece)
        if match is not None:
            found = (read + match.end, match.length)
            break
        read += len(piece)
    assert found == by_re(pattern, text)


@settings(max_examples=200)
@given(st.sampled_from(PATTERNS), texts)
def test_what_is_not_held_is_in_no_match(pattern: str, text: str) -> None:
    search, read, safe = Search(search_pattern(pattern)), 0, 0
    for character in text:
        data = character.encode()
        match = search.push(data)
        if match is not None:
            assert read + match.end - match.length >= safe
            return
        read += len(data)
        safe = read - search.held
    assert 0 <= search.held <= read


def test_a_text_of_a_megabyte_takes_as_many_steps_as_it_has_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = SearchPattern("(a+)+b")
    steps = 0
    step = pattern.automaton.step

    def counted(state: int, data: bytes) -> int:
        nonlocal steps
        steps += 1
        return step(state, data)

    monkeypatch.setattr(pattern.automaton, "step", counted)
    search = Search(pattern)
    for _ in range(100):
        assert search.push(b"a" * 100) is None
    assert steps <= 4 * 10_000  # backtracking would need 2^10,000


def test_places_where_a_match_may_have_begun_are_bounded() -> None:
    search = Search(SearchPattern("[a-z]{1,900}Z"))
    with pytest.raises(ConstraintError, match=f"more than {MAX_BEGUN} places") as caught:
        search.push(b"a" * 2000)
    assert caught.value.code == "limit"


@pytest.mark.parametrize(
    ("pattern", "code"),
    [
        ("a*", "unsupported"),
        ("(?:)", "unsupported"),
        ("^a", "unsupported"),
        (r"\ba", "unsupported"),
        ("a(?=b)", "unsupported"),
        (r"(a)\1", "unsupported"),
        ("[", "syntax"),
        ("a" * 257, "limit"),
        ("[^\\s\\S]", "empty"),
    ],
)
def test_what_cannot_be_searched_for_is_refused(pattern: str, code: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        SearchPattern(pattern)
    assert caught.value.code == code


def test_what_came_before_a_reset_is_part_of_no_match() -> None:
    search = Search(search_pattern("ab"))
    search.push(b"a")
    assert search.held == 1
    search.reset()
    assert search.held == 0
    assert search.push(b"b") is None
