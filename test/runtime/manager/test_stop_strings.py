from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trellis.runtime.manager.stop_strings import StopMatcher

TEXTS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Oracle: the smallest end, then the longest."""
    ends = [
        (start + len(stop), -len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    return (min(ends)[0], min(ends)[2]) if ends else None


def held(text: str, stops: list[str]) -> int:
    """Oracle: the longest end of the text that begins a stop string."""
    return max(n for n in range(len(text) + 1) if n == 0 or any(s.startswith(text[-n:]) for s in stops))


@given(TEXTS, STOPS)
def test_finds_the_match_that_is_complete_first(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert matcher.feed(text) == first_match(text, stops)
    if first_match(text, stops) is None:
        assert matcher.held == held(text, stops)


@given(TEXTS, STOPS, st.data())
def test_pieces_do_not_matter(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher, read = StopMatcher(stops), 0
    while read < len(text):
        piece = text[read : read + data.draw(st.integers(1, 5))]
        match = matcher.feed(piece)
        if match is not None:
            assert (read + match[0], match[1]) == first_match(text, stops)
            return
        read += len(piece)
    assert first_match(text, stops) is None
