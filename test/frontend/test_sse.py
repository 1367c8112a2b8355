"""Server-sent events: the same events, wherever the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis.frontend.backends.sse import EventTooLong, SSEParser


def parse(*pieces: bytes) -> list[str]:
    parser = SSEParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_one_event() -> None:
    assert parse(b'data: {"a": 1}\n\n') == ['{"a": 1}']


def test_the_blank_after_the_colon_is_optional_and_only_one_is_dropped() -> None:
    assert parse(b"data:x\n\ndata:  y\n\n") == ["x", " y"]


def test_several_data_lines_are_one_event() -> None:
    assert parse(b"data: a\ndata: b\ndata\n\n") == ["a\nb\n"]


def test_comments_and_other_fields_are_ignored() -> None:
    assert parse(b": keep-alive\nid: 7\nevent: message\nretry: 10\ndata: a\ndatabase: no\n\n:\n\n") == ["a"]


def test_all_line_ends() -> None:
    assert parse(b"data: a\r\n\r\ndata: b\r\rdata: c\n\n") == ["a", "b", "c"]
    assert parse(b"data: a\r", b"\n", b"\r", b"\ndata: b\r\n\r\n") == ["a", "b"]
    assert parse(b"data: a\r", b"", b"\n\r\n") == ["a"]


def test_an_event_without_its_blank_line_is_not_complete() -> None:
    assert parse(b"data: a\n") == []
    assert parse(b"data: a\n\ndata: b") == ["a"]


def test_a_byte_order_mark_is_dropped_once() -> None:
    assert parse(b"\xef\xbb\xbfdata: a\n\n") == ["a"]
    assert parse(b"\xef", b"\xbb\xbfdata: a\n\n") == ["a"]


texts = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
line_ends = st.sampled_from(["\n", "\r\n", "\r"])
noise = st.sampled_from(["", ": comment", "id: 1", "event: x"])


@given(st.lists(st.tuples(st.lists(texts, min_size=1, max_size=3), noise, line_ends), max_size=6), st.data())
def test_cutting_the_bytes_anywhere_changes_nothing(events, data) -> None:
    stream = ""
    for lines, extra, end in events:
        # CR and LF of different events must not run together into one CRLF.
        stream += (extra + end if extra else "") + "".join(f"data: {line}{end}" for line in lines) + end
    expected = ["\n".join(lines) for lines, _, _ in events]
    raw = stream.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=10)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert parse(*pieces) == expected
    assert parse(*(raw[i : i + 1] for i in range(len(raw)))) == expected


@pytest.mark.parametrize("pieces", [[b"data: " + b"x" * 50], [b"data: ", *[b"x"] * 50], [b"data: x\n"] * 10])
def test_an_event_without_an_end_is_bounded(pieces) -> None:
    parser = SSEParser(max_event=40)
    with pytest.raises(EventTooLong, match="more than 40 bytes"):
        _ = [parser.feed(piece) for piece in pieces]


def test_the_bound_is_for_one_event_and_not_for_comments() -> None:
    parser = SSEParser(max_event=40)
    for _ in range(20):
        assert parser.feed(b": still here\n") == []
        assert parser.feed(b"data: " + b"y" * 20 + b"\n\n") == ["y" * 20]


@pytest.mark.timeout(30)  # copying what has come for every piece would take minutes
def test_an_event_of_many_pieces() -> None:
    parser = SSEParser()
    for piece in [b"data: ", *[b"x" * 256] * 32_768]:
        assert parser.feed(piece) == []
    [event] = parser.feed(b"\n\n")
    assert len(event) == 8 << 20
