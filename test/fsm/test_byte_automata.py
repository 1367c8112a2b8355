"""The automata below the tokens: chains, counters, the trie of options, the walk of the vocabulary."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trellis.fsm import Limits, Vocabulary
from trellis.fsm.automaton import DEAD, START, ByteAutomaton, chain
from trellis.fsm.dfa import LazyDfa
from trellis.fsm.flat_trie import FlatTrie
from trellis.fsm.limits import Budget
from trellis.fsm.options import OptionsAutomaton
from trellis.fsm.regex import Regex
from trellis.fsm.regex_source import RegexSource
from trellis.fsm.spelling import spelling_of, writable
from trellis.fsm.syntax import Builder
from trellis.fsm.trie import TokenTrie, trie_of
from trellis.fsm.walk import TrieWalk

RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)


def automaton(pattern: str) -> LazyDfa:
    builder = Builder()
    budget = Budget("regex", Limits())
    return LazyDfa(RegexSource(Regex(pattern, Limits()).tree(builder), builder, budget), budget)


AUTOMATA = [
    automaton(r'\{"city": "(Paris|東京)", "n": \d{1,3}\}'),
    automaton("[é漢]x|ß"),
    automaton("a{3,9}bcd(ef)?"),
    OptionsAutomaton(["Paris", "Paris is", "東京", "東大", "", "é"]),
]


@pytest.mark.parametrize("machine", AUTOMATA)
def test_along_a_chain_the_other_255_bytes_and_the_end_are_rejected(machine: ByteAutomaton) -> None:
    stack, seen, forced = [START], {START}, 0
    while stack:
        state = stack.pop()
        data, end = chain(machine, state, 100)
        assert machine.step(state, data) == end
        for byte in data:
            forced += 1
            assert not machine.accepting(state)
            assert machine.live_bytes(state) == [byte]
            assert all(machine.step(state, bytes([other])) == DEAD for other in range(256) if other != byte)
            state = machine.step(state, bytes([byte]))
        assert machine.only_byte(end) == -1
        for byte in machine.live_bytes(end):
            after = machine.step(end, bytes([byte]))
            assert after != DEAD
            if after not in seen and len(seen) < 300:
                seen.add(after)
                stack.append(after)
    assert forced


def test_a_chain_ends_at_its_limit() -> None:
    assert chain(automaton("abcdefgh"), START, 5)[0] == b"abcde"


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        ("a{5000}b{5000}", 30),
        (".{0,10000}", 400),
        ("(ab{2,5000}){1,5000}", 300),
        ("((a{1,50}b){1,50}c){1,50}", 900),
    ],
)
def test_bounded_repeats_are_not_unrolled(pattern: str, most: int) -> None:
    machine = automaton(pattern)
    state = machine.step(
        START, ("abb" if "(ab" in pattern else "aaab" if "((" in pattern else "aaa").encode()
    )
    assert state != DEAD
    assert len(machine) < most


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a{3,5000}", "a" * 5000),
        ("(a{2,3}){4,5}", "a" * 15),
        ("(ab?){100,200}", "ab" * 150),
        ("((a{1,2}b){1,2}c){1,2}", "aabcabc"),
        ("(?:x{1,3}y?){2,4}z", "xxxxyxz"),
    ],
)
def test_counters_count(pattern: str, text: str) -> None:
    """On every prefix and one step beyond, the counters agree with ``re``."""
    machine = automaton(pattern)
    state = START
    oracle = re.compile(pattern)
    for i, char in enumerate(text):
        if i < 40 or i > len(text) - 5:
            assert machine.accepting(state) == (oracle.fullmatch(text[:i]) is not None)
        state = machine.step(state, char.encode())
        assert state != DEAD
    assert machine.accepting(state)
    beyond = machine.step(state, text[0].encode())
    assert (beyond != DEAD and machine.accepting(beyond)) == (oracle.fullmatch(text + text[0]) is not None)


words = st.lists(st.binary(min_size=1, max_size=5), min_size=1, max_size=30, unique=True).map(sorted)


@given(words=words, probe=st.binary(max_size=5))
def test_a_flat_trie_finds_what_it_holds(words: list[bytes], probe: bytes) -> None:
    trie = FlatTrie(words)
    prefixes = {word[:n] for word in words for n in range(len(word) + 1)}
    assert len(trie) == len(prefixes)
    assert trie.depth == max(map(len, words))
    assert [trie.find(word) for word in words] == trie.ends.tolist()
    assert (trie.find(probe) >= 0) == (probe in prefixes)
    assert np.array_equal(
        np.diff(trie.levels), [len({p for p in prefixes if len(p) == n}) for n in range(trie.depth + 1)]
    )


def naive_vocabulary(tokens: list[bytes]) -> Vocabulary:
    return Vocabulary([b"", *tokens], len(tokens) + 3, frozenset({0}), lambda _: [], "naive")


@settings(RELAXED)
@given(
    tokens=st.lists(st.text("abcé漢\n", min_size=1, max_size=6).map(str.encode), min_size=1, max_size=40),
    pattern=st.sampled_from([r"[a-c]*", r"(ab|é漢)+c?", r".{2,4}", r"[^a]{1,9}", r"abc.*", r"漢?é*"]),
)
def test_a_walk_allows_what_stepping_allows(tokens: list[bytes], pattern: str) -> None:
    """Dense and sparse levels, tokens with equal bytes, and walks from below the root."""
    trie = TokenTrie(naive_vocabulary(tokens))
    machine = automaton(pattern)
    walk = TrieWalk(trie, machine)
    for prefix in [b"", b"a", "é".encode(), "漢".encode()[:2], b"ab"]:
        state = machine.step(START, prefix)
        if state == DEAD:
            continue
        nodes, states = walk.allowed(state)
        allowed = {
            trie.data[token]: machine.step(state, trie.data[token]) for token in range(1, len(tokens) + 1)
        }
        allowed = {data: reached for data, reached in allowed.items() if reached != DEAD}
        assert {trie.data[trie.token[n]]: int(s) for n, s in zip(nodes, states, strict=True)} == allowed
        bits = np.unpackbits(trie.pack(nodes, eos=False).view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == [i for i, data in enumerate(trie.data) if data in allowed]
        for data in list(allowed)[:5]:
            node = trie.nodes.find(data[:1])
            below = {rest for other in trie.data if other.startswith(data[:1]) and (rest := other[1:])}
            expected = any(machine.step(state, rest) != DEAD for rest in below)
            assert walk.any_allowed(state, node) == expected


def test_special_tokens_and_eos_are_in_no_trie() -> None:
    vocabulary = Vocabulary([b"<eos>", b"", b"a", b"ab"], 4, frozenset({0}), lambda _: [], "eos has bytes")
    trie = trie_of(vocabulary)
    assert trie.data == [b"", b"", b"a", b"ab"]
    assert trie_of(vocabulary) is trie


def test_a_vocabulary_without_some_bytes_cannot_write_some_characters() -> None:
    every = [bytes([b]) for b in range(256)]
    assert spelling_of(naive_vocabulary(every)).alphabet == ((0, 0xD7FF), (0xE000, 0x10FFFF))
    lacking = [t for t in every if t not in (b"7", b"\xf1", b"\xa9")]
    spelling = spelling_of(naive_vocabulary(lacking))
    assert spelling.bytewise
    for char, expected in [
        ("7", False),
        ("8", True),
        ("é", False),
        ("è", True),
        ("\U00040000", False),
        ("😀", True),
    ]:
        assert writable(spelling.alphabet, char) == expected
    whole = spelling_of(naive_vocabulary([*lacking, "é".encode(), b"\xe6\xbc", "漢".encode()[1:], b"x7"]))
    assert not whole.bytewise
    assert writable(whole.alphabet, "é8")
    assert not writable(whole.alphabet, "7")
    assert not writable((), "a")
    assert writable((), "")
