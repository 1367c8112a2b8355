"""Look-ahead, look-behind, word boundaries and anchors anywhere mean what ``re.fullmatch`` means."""

from __future__ import annotations

import itertools
import random
import re
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from trellis.errors import ConstraintError
from trellis.fsm import ConstraintSpec, Limits, Vocabulary, compile_grammar
from trellis.fsm.automaton import DEAD, START, ByteAutomaton
from trellis.fsm.compressed import byte_automaton
from trellis.fsm.drawing import explore

RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck))
MODERN = sys.version_info >= (3, 11)  # possessive quantifiers and atomic groups
LETTERS = "ab é_\n"
TEXTS = ["".join(letters) for n in range(4) for letters in itertools.product(LETTERS, repeat=n)]

_atom = st.sampled_from(["a", "b", "a", "b", "é", "_", ".", "(?s:.)", "[ab]", "[^a]", r"\w", r"\W", r"\n"])
_anchor = st.sampled_from([r"\b", r"\B", "^", "$", "(?m:^)", "(?m:$)", r"\A", r"\Z", r"(?a:\b)"])
_repeats = st.sampled_from(
    ["*", "+", "?", "*?", "{2}", "{1,2}", "{2,3}", "{0,2}", *(["*+", "?+"] if MODERN else [])]
)
_wide = st.one_of(
    st.lists(_atom, max_size=2).map("".join),
    st.tuples(_atom, _atom).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
    st.tuples(_atom, _anchor, _atom).map("".join),
    st.tuples(_atom, _atom).map(lambda pair: f"{pair[0]}(?!{pair[1]})"),
)
_behind = st.tuples(st.sampled_from(["(?<=", "(?<!"]), _wide).map(lambda pair: f"{pair[0]}{pair[1]})")


def _grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    opening = ["(?=", "(?!", "(?=", "(?!", "(?:", "(?i:", *(["(?>"] if MODERN else [])]
    return st.one_of(
        st.lists(inner, min_size=2, max_size=4).map("".join),
        st.tuples(st.sampled_from(opening), inner).map(lambda pair: f"{pair[0]}{pair[1]})"),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, _repeats).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    )


PATTERNS = st.recursive(st.one_of(_atom, _atom, _behind, _anchor), _grow, max_leaves=9)


def built(pattern: str) -> ByteAutomaton | None:
    """The automaton, or None if no text matches. A pattern that is refused by name is no example."""
    try:
        return byte_automaton(ConstraintSpec.regex(pattern), Limits())
    except ConstraintError as error:
        assume(error.code != "unsupported")
        if error.code == "empty":
            return None
        raise


def accepts(automaton: ByteAutomaton | None, text: str) -> bool:
    if automaton is None:
        return False
    state = automaton.step(START, text.encode())
    return state != DEAD and automaton.accepting(state)


@settings(RELAXED, max_examples=400)
@given(pattern=PATTERNS, seed=st.integers(0, 2**32))
def test_random_assertions_mean_what_re_means(pattern: str, seed: int) -> None:
    rng = random.Random(seed)
    oracle = re.compile(pattern)
    automaton = built(pattern)
    longer = ["".join(rng.choices(LETTERS, k=rng.randint(4, 8))) for _ in range(10)]
    for text in [*rng.sample(TEXTS, 50), *longer]:
        assert accepts(automaton, text) == (oracle.fullmatch(text) is not None), text


@settings(RELAXED, max_examples=150)
@given(pattern=PATTERNS)
def test_no_state_is_a_dead_end(pattern: str) -> None:
    automaton = built(pattern)
    assume(automaton is not None)
    assert automaton is not None
    ways = explore(automaton, over_bytes=True).ways
    targets = {state: {way.target for way in out} for state, out in ways.items()}
    assert set().union(*targets.values()) <= targets.keys()  # all were looked at
    ending = {state for state in targets if automaton.accepting(state)}
    while more := {s for s, reached in targets.items() if reached & ending} - ending:
        ending |= more
    assert ending == targets.keys()


@pytest.mark.parametrize(
    ("pattern", "accepted", "rejected"),
    [
        (
            r"(?=.*\d)(?=.*[a-zß])(?!.*[.]).{4,8}",
            ["abc1", "1234ß", "é2zzzzzz"],
            ["abcd", "1234", "a1", "a1.b"],
        ),
        (r"(?!(?:con|aux)$)[a-z]+", ["cons", "auxiliary", "co"], ["con", "aux", ""]),
        (r"(?:(?!foo).)*", ["", "fo", "ffo", "fofo"], ["foo", "a foo", "ffoo"]),
        (r'"""(?:(?!""").)*"""', ['"""a"b""c"""', '""""""'], ['"""a"""b"""', '"""']),
        (r"(?:(?=é)\w|(?!é)[^\n])+x?", ["éaé", " x", "x"], ["", "\n"]),
        (r"(?:a(?=b|$)|b(?=a|$))*", ["abab", "a", "", "ba"], ["aa", "abb"]),
        (r"\bcat\b|\w+(?<!s)\b!", ["cat", "dog!", "é!"], ["dogs!", "cats", "!"]),
        (r"[a-z]+(?: \b[a-z]+\b)*\.(?<=end\.)", ["the end.", "end."], ["end", "the start.", "end.end"]),
        (r"(?<![a-z])x|é(?<=é)y", ["x", "éy"], ["y"]),
        (r"(?m)^a$\n^b$", ["a\nb"], ["a\n", "ab", "a\nb\n"]),
        ("(?:a|$)" * 40, ["", "a", "a" * 40], ["a" * 41, "a\n\n"]),
        ("a?$" * 40 + "\n?", ["", "a", "\n", "a\n"], ["aa", "a\na"]),
        ("^a?" * 40, ["", "a"], ["aa"]),
        (r"(?:^a|\nb$)*", ["a", "a\nb", "\nb", ""], ["aa", "a\nb\nb"]),
        (r"a(?=.{2}\Z)[^\n]*", ["abc", "aé漢"], ["ab", "abcd"]),
        (r"(?:x(?=y)|y){2}", ["xy", "yy"], ["xx", "x", "yx"]),
        (r"(?:(?=a)|a|b){2}", ["a", "aa", "ab", "ba", "bb"], ["b", ""]),
        (r"(?!(?!a))\w", ["a"], ["b"]),
        (r"(?=(?:a|b)*c).{3}", ["abc", "bca"], ["aba", "xac"]),
        (r"(?i)(?!ß)\w(?<!k)", ["s", "é"], ["ß", "ẞ", "K", "\u212a"]),
        ("(?=\x00)[\x00a]{2}", ["\x00a"], ["a\x00"]),
        (r"\B", [] if re.fullmatch(r"\B", "") is None else [""], ["a"]),
    ],
)
def test_assertions_everywhere(
    tiny: Vocabulary, pattern: str, accepted: list[str], rejected: list[str]
) -> None:
    texts = [(text, text in accepted) for text in accepted + rejected]
    assert [(text, re.fullmatch(pattern, text) is not None) for text, _ in texts] == texts
    if not accepted:
        with pytest.raises(ConstraintError, match="no text matches"):
            compile_grammar(ConstraintSpec.regex(pattern), tiny)
        return
    grammar = compile_grammar(ConstraintSpec.regex(pattern), tiny)
    eos = min(tiny.eos_token_ids)
    for text, expected in texts:
        matcher = grammar.matcher()
        assert grammar.accepts(text) == expected, text
        assert (all(map(matcher.accept, tiny.encode(text))) and matcher.accept(eos)) == expected, text


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?=a)b",
        r"(?=.*x)[a-w]*",
        r"(?!.*)a",
        r"a(?<=b)",
        r"\Ba\Zb",
        r"a\bb",
        r"(?=(a|b)*a(a|b){3}$)(?=(a|b)*b(a|b){3}$)[ab]*",
        r"(?=.{500}x).{0,500}",
    ],
)
def test_assertions_that_contradict_each_other_leave_no_text(tiny: Vocabulary, pattern: str) -> None:
    with pytest.raises(ConstraintError, match="no text matches") as caught:
        compile_grammar(ConstraintSpec.regex(pattern), tiny)
    assert caught.value.code == "empty"


def test_what_an_assertion_forces_is_forced(tiny: Vocabulary) -> None:
    """Every way but one is closed by what must come later."""
    grammar = compile_grammar(ConstraintSpec.regex(r"(?=.*: yes$)(?:answer: (?:yes|no)|reply: no)"), tiny)
    matcher = grammar.matcher()
    written: list[int] = []
    while run := matcher.forced():
        written += run
        assert all(map(matcher.accept, run))
    assert b"".join(tiny.token_bytes[token] for token in written) == b"answer: yes"
    assert matcher.is_finished()


def test_what_a_vocabulary_cannot_write_is_no_way_out(gapped: Vocabulary) -> None:
    """It lacks the digit 7, which is all that the look-ahead leaves."""
    with pytest.raises(ConstraintError, match="vocabulary cannot write"):
        compile_grammar(ConstraintSpec.regex(r"(?a)(?![0-68-9])\d"), gapped)
    with pytest.raises(ConstraintError, match="vocabulary cannot write"):
        compile_grammar(ConstraintSpec.regex(r"(?=.*7)[0-9]+"), gapped)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"\b\w{1,10}\b", "abc"),
        (r"^(?!\d)\w+$", "abc"),
        (r"(?:(?!a)\w){0,1000}", "bcd"),
        (r"[a-z]+(?<=[a-z])\s\b[a-z]", "abc d"),
    ],
)
def test_assertions_that_neighbours_decide_cost_nothing(pattern: str, text: str) -> None:
    """They are settled in the tree, but for one at its start: no state further on has an obligation."""
    automaton = built(pattern)
    assert accepts(automaton, text)
    assert automaton is not None
    assert len(automaton) < 200


@pytest.mark.skipif(not MODERN, reason="Python 3.10 has no possessive quantifiers")
@pytest.mark.parametrize(
    ("pattern", "right"), [(r"(?=a*+)ab?", True), (r"(?=\d++x)\d+x", True), (r"(?=(?>a|ab)b)ab+", False)]
)
def test_atomic_groups_in_assertions_are_right_or_refused(pattern: str, right: bool) -> None:
    if not right:
        with pytest.raises(ConstraintError, match="possessive") as caught:
            byte_automaton(ConstraintSpec.regex(pattern), Limits())
        assert caught.value.code == "unsupported"
        return
    automaton = byte_automaton(ConstraintSpec.regex(pattern), Limits())
    for text in ["", "a", "ab", "b", "1x", "12x", "x", "12"]:
        assert accepts(automaton, text) == (re.fullmatch(pattern, text) is not None), text


# --- the algebra of interegular as an oracle of whole languages ---

_plain = st.recursive(
    st.sampled_from(["a", "b", "c", "[ab]", "[^a]"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from("*+?")).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=5,
)


@settings(RELAXED, max_examples=120)
@given(ahead=_plain, never=_plain, rest=_plain)
def test_look_ahead_is_intersection_and_difference(ahead: str, never: str, rest: str) -> None:
    """The whole language, on an alphabet of four characters: interegular's automata, combined by its algebra."""
    interegular = pytest.importorskip("interegular")

    def machine(pattern: str) -> Any:
        return interegular.parse_pattern(pattern).to_fsm()

    every = "(?:.|\n)*"
    expected = machine(rest) & machine(f"(?:{ahead}){every}")
    expected = expected.difference(machine(f"(?:{never}){every}"))
    automaton = built(f"(?={ahead})(?!{never})(?:{rest})")
    pairs = [(expected.initial, START if automaton is not None else DEAD)]
    seen = set(pairs)
    while pairs:
        theirs, ours = pairs.pop()
        final = automaton is not None and ours != DEAD and automaton.accepting(ours)
        assert final == (theirs in expected.finals)
        for char in "abcd":
            after = expected.map.get(theirs, {}).get(expected.alphabet[char])
            reached = automaton.step(ours, char.encode()) if automaton is not None and ours != DEAD else DEAD
            if (after, reached) not in seen:
                seen.add((after, reached))
                pairs.append((after, reached))
