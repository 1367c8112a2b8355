"""Stop strings and stop patterns together: the scheduler finds them in bytes, the detokenizer in text, and they agree."""

from __future__ import annotations

import re
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from trellis.runtime.manager.detokenizer import TextStream
from trellis.runtime.messages import DetokenizeOptions
from trellis.runtime.scheduler.stop import StopScanner

STOPS = ["\n\n", "END", "é"]
PATTERNS = [r"[0-9]+\.", "Q:|A:", r"\s{3}", "(ab)+c"]
tokens = st.lists(
    st.sampled_from(["a", "b", "ab", "c", "é", "\n", " ", "1", "2.", "Q", ":", "EN", "D"]), max_size=14
)


def reference(text: str, stops: list[str], patterns: list[str]) -> tuple[str, str | None]:
    """The text up to the first stop, and which one that was, by looking at every end in turn."""
    for end in range(1, len(text) + 1):
        ended = [(len(stop), 1, stop) for stop in stops if text[:end].endswith(stop)]
        for pattern in patterns:
            starts = [s for s in range(end) if re.compile(pattern).fullmatch(text, s, end)]
            ended += [(end - min(starts), 0, pattern)] if starts else []
        if ended:
            length, _, stop = max(ended, key=lambda each: each[:2])
            return text[: end - length], stop
    return text, None


@settings(max_examples=300)
@given(
    tokens,
    st.lists(st.sampled_from(STOPS), unique=True, max_size=2),
    st.lists(st.sampled_from(PATTERNS), unique=True, max_size=2),
)
def test_both_stop_where_the_reference_does(
    spelled: list[str], stops: list[str], patterns: list[str]
) -> None:
    vocabulary = SimpleNamespace(
        token_bytes=[piece.encode() for piece in spelled], special_token_ids=frozenset()
    )
    stream = TextStream(vocabulary, DetokenizeOptions(stops, True, 0, patterns))
    scanner = StopScanner(stops, patterns)
    text, found = "", None
    for token, piece in enumerate(spelled):
        text += stream.feed(token)
        found = found or scanner.push(piece.encode())
        assert found == stream.matched
        if found is not None:
            break
    text += stream.finish()
    expected, stop = reference("".join(spelled), stops, patterns)
    assert text == expected
    assert found == stop
    ending = stream.ending()
    assert "".join(spelled[: ending.kept_tokens]) + ending.tail_text == expected


def test_a_match_that_began_is_held_back_and_shown_if_it_does_not_end() -> None:
    vocabulary = SimpleNamespace(token_bytes=[b'say "', b"a", b"b"], special_token_ids=frozenset())
    stream = TextStream(vocabulary, DetokenizeOptions([], True, 0, ['"[ab]{3}"']))
    assert [stream.feed(0), stream.feed(1), stream.feed(2)] == ["say ", "", ""]
    assert stream.finish() == '"ab'
