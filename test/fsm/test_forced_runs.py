"""The rule that turns forced bytes into forced tokens, on a vocabulary small enough to see why."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trellis.fsm import ConstraintSpec, Vocabulary, compile_grammar
from trellis.fsm.forced import forced_run, tail_of, whole_characters
from trellis.fsm.trie import TokenTrie

TOKENS = ["a", "b", "c", "d", "e", "ab", "cd", "abc", "de", " ", " b", "\n", "\n\n", "é", "x"]
IDS = {text: token for token, text in enumerate(TOKENS)}
BYTES = {0xC3: 15, 0xA9: 16, 0xA8: 17}


def greedy(text: str) -> list[int]:
    """The longest token first; two newlines are one token only at the end of the text."""
    out: list[int] = []
    while text:
        usable = [t for t in TOKENS if text.startswith(t) and not (t == "\n\n" and text != t)]
        if usable:
            out.append(IDS[max(usable, key=len)])
        else:
            out += [BYTES[byte] for byte in text[0].encode()]
        text = text[max(map(len, usable), default=1) :]
    return out


VOCABULARY = Vocabulary(
    [*(text.encode() for text in TOKENS), b"\xc3", b"\xa9", b"\xa8", b""],
    20,
    frozenset({18}),
    greedy,
    "letters",
)
TRIE = TokenTrie(VOCABULARY)


def ids(*texts: str) -> tuple[int, ...]:
    return tuple(IDS[text] for text in texts)


def nothing_spans(_: int) -> bool:
    return False


def below(*texts: str) -> Callable[[int], bool]:
    """Spans for these forced endings only."""
    nodes = {TRIE.nodes.find(text.encode()) for text in texts}
    return lambda node: node in nodes


def test_the_forced_text_is_spelled_as_the_tokenizer_does() -> None:
    assert forced_run(TRIE, [], b"abcde", nothing_spans, []) == ids("abc", "de")


def test_history_stands_where_the_tokenizer_would_spell_it_otherwise() -> None:
    assert forced_run(TRIE, ids("a"), b"b", nothing_spans, []) == ids("b")
    assert forced_run(TRIE, ids("x", "ab"), b"ce", nothing_spans, []) == ids("c", "e")
    assert forced_run(TRIE, ids("ab"), b"cde", nothing_spans, []) == ids("cd", "e")
    assert forced_run(TRIE, ids("x", "b"), b"ce", nothing_spans, []) == ids("c", "e")


def test_a_run_is_cut_where_an_allowed_token_spans_its_end() -> None:
    assert forced_run(TRIE, [], b"xa", below("a"), []) == ids("x")
    assert forced_run(TRIE, [], b"xab", below("ab"), []) == ids("x")
    assert forced_run(TRIE, [], b"xd", below("d"), []) == ids("x")
    assert forced_run(TRIE, [], b"xabc", below("c"), []) == ids("x")  # inside the token abc
    assert forced_run(TRIE, [], b"a", below("a"), []) == ()


def test_only_the_last_four_tokens_are_looked_at() -> None:
    assert forced_run(TRIE, [], b"abxxxx", below("abxxxx"), []) == ids("ab", "x", "x", "x", "x")


def test_a_run_is_cut_to_what_every_next_character_leaves_alike() -> None:
    assert forced_run(TRIE, [], b"x\n\n", nothing_spans, []) == ids("x", "\n\n")
    assert forced_run(TRIE, [], b"x\n\n", nothing_spans, ["e", "x"]) == ids("x")


def test_a_text_that_plain_tokens_cannot_spell_is_not_forced() -> None:
    special = Vocabulary(VOCABULARY.token_bytes, 20, frozenset({18}), lambda _: [18], "special")
    assert forced_run(TokenTrie(special), [], b"ab", nothing_spans, []) == ()
    unknown = Vocabulary(VOCABULARY.token_bytes, 20, frozenset({18}), lambda _: [99], "unknown")
    assert forced_run(TokenTrie(unknown), [], b"ab", nothing_spans, []) == ()


def test_a_tail_that_begins_inside_a_character_is_widened() -> None:
    first, second = 15, 16
    assert tail_of(TRIE, [*ids("x", "x"), first, second, *ids("a", "b", "c")]) == [
        first,
        second,
        *ids("a", "b", "c"),
    ]
    assert tail_of(TRIE, ids("a", "b", "c", "d", "e")) == list(ids("b", "c", "d", "e"))
    assert forced_run(TRIE, [first], b"\xa9x", nothing_spans, []) == ()  # é is one token, history has another


@pytest.mark.parametrize(
    ("data", "length"), [(b"ab\xc3", 2), ("a漢".encode()[:-1], 1), (b"\xa9", 0), (b"", 0)]
)
def test_a_run_never_ends_inside_a_character(data: bytes, length: int) -> None:
    assert whole_characters(data) == length


def test_forced_bytes_inside_a_character_wait_for_the_choice() -> None:
    """é and è share their first byte: it is forced, but it is no character yet."""
    matcher = compile_grammar(ConstraintSpec.choices(["aé", "aè"]), VOCABULARY).matcher()
    assert matcher.forced() == list(ids("a"))
    assert matcher.accept(IDS["a"])
    assert matcher.forced() == []
    matcher = compile_grammar(ConstraintSpec.regex("xé"), VOCABULARY).matcher()
    assert matcher.forced() == list(ids("x", "é"))
