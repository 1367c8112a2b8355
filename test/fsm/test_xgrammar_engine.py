"""The ``xgrammar`` engine: its language against a naive parser, and the guards around the library."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from trellis.errors import ConstraintError, RequestAborted
from trellis.fsm import (
    ConstraintSpec,
    Grammar,
    GrammarCompiler,
    Limits,
    Vocabulary,
    compile_grammar,
    xgrammar_engine,
)
from trellis.fsm.charset import Ranges
from trellis.fsm.gbnf import Alt, Chars, Node, Ref, Repeat, Seq, parse

pytest.importorskip("xgrammar", reason="needs the extra 'ebnf'")

RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck))


def build(text: str, vocabulary: Vocabulary, limits: Limits | None = None) -> Grammar:
    return compile_grammar(ConstraintSpec.grammar(text), vocabulary, "xgrammar", limits)


def allowed(grammar: Grammar, vocabulary: Vocabulary, before: str = "") -> set[bytes]:
    """Bytes of the tokens that may follow the (canonical tokens of the) text; EOS is ``b"<eos>"``."""
    matcher = grammar.matcher()
    assert all(map(matcher.accept, vocabulary.encode(before)))
    row = np.empty(vocabulary.mask_words, np.int32)
    assert matcher.fill_mask(row)
    ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return {b"<eos>" if i in vocabulary.eos_token_ids else bytes(vocabulary.token_bytes[i]) for i in ids}


# --- a naive parser as the oracle ---------------------------------------------------------------------------


class Oracle:
    """Where each rule can end when it begins at each place: the least fixed point over all of them."""

    def __init__(self, rules: dict[str, Node], text: str) -> None:
        self.rules, self.text = rules, text
        self.ends: dict[tuple[str, int], set[int]] = {
            (name, at): set() for name in rules for at in range(len(text) + 1)
        }
        changed = True
        while changed:
            changed = False
            for (name, at), known in self.ends.items():
                found = self.reach(rules[name], {at})
                changed |= not found <= known
                known |= found

    def matches(self) -> bool:
        return len(self.text) in self.ends["root", 0]

    def reach(self, node: Node, starts: set[int]) -> set[int]:
        if isinstance(node, Chars):
            return {at + 1 for at in starts if at < len(self.text) and has(node.ranges, self.text[at])}
        if isinstance(node, Ref):
            return set().union(*(self.ends[node.name, at] for at in starts))
        if isinstance(node, Seq):
            for item in node.items:
                starts = self.reach(item, starts)
            return starts
        if isinstance(node, Alt):
            return set().union(*(self.reach(option, starts) for option in node.options))
        assert isinstance(node, Repeat)
        return self.repeated(node, starts)

    def repeated(self, node: Repeat, starts: set[int]) -> set[int]:
        for _ in range(node.low):
            starts = self.reach(node.item, starts)
        out = set(starts)
        for _ in range(len(self.text) + 1 if node.high is None else node.high - node.low):
            starts = self.reach(node.item, starts)
            out |= starts
        return out


def has(ranges: Ranges, char: str) -> bool:
    return any(lo <= ord(char) <= hi for lo, hi in ranges)


# --- random grammars ----------------------------------------------------------------------------------------

LETTERS = "abé漢"
NAMES = ["root", "one", "two"]
_atoms = st.one_of(
    st.text(LETTERS, max_size=2).map(lambda text: f'"{text}"'),
    st.sampled_from(["[ab]", "[^a]", "[b-é]", "[a漢]", "."]),
    st.sampled_from(NAMES),
    st.sampled_from(NAMES),
)
_bodies = st.recursive(
    _atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({' '.join(parts)})"),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({' | '.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}"])).map("".join),
    ),
    max_leaves=6,
)
GRAMMARS = st.lists(_bodies, min_size=3, max_size=3).map(
    lambda bodies: "\n".join(f"{name} ::= {body}" for name, body in zip(NAMES, bodies, strict=True))
)


@settings(RELAXED, max_examples=50)
@given(text=GRAMMARS, seed=st.integers(0, 2**32))
def test_the_language_is_that_of_a_naive_parser(tiny: Vocabulary, text: str, seed: int) -> None:
    """On random grammars (left-recursive, ambiguous, with cycles and dead ends): whole texts and every token."""
    grammar = build_or_discard(text, tiny)
    rules = parse(text, Limits())
    rng = random.Random(seed)
    for _ in range(10):
        word = "".join(rng.choices(LETTERS, k=rng.randrange(6)))
        assert grammar.accepts(word) == Oracle(rules, word).matches(), word
    matcher, row = grammar.matcher(), np.empty(tiny.mask_words, np.int32)
    output: list[int] = []
    for _ in range(8):
        assert matcher.fill_mask(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little").astype(bool)
        assert bits.any(), "a dead end"
        for token in range(tiny.size):
            taken = matcher.accept(token)
            assert taken == bits[token], token
            matcher.rollback(int(taken))
        plain = tiny.token_bytes
        written = b"".join(plain[token] for token in output)
        if matcher.is_accepting():
            assert Oracle(rules, written.decode()).matches()
        token = int(rng.choice(np.flatnonzero(bits).tolist()))
        if token in tiny.eos_token_ids:
            break
        assert matcher.accept(token)
        output.append(token)


def build_or_discard(text: str, vocabulary: Vocabulary) -> Grammar:
    try:
        return build(text, vocabulary)
    except ConstraintError as error:
        assume(error.code not in ("empty", "unsupported", "timeout"))
        raise


# --- the guards ---------------------------------------------------------------------------------------------


def test_a_root_that_refers_to_itself_keeps_tokens_that_cross_its_end(tiny: Vocabulary) -> None:
    extended = with_tokens(tiny, [b"))", b")))", b"x)"])
    grammar = build('root ::= "(" root ")" | "x"', extended)
    matcher = grammar.matcher()
    assert all(matcher.accept(token) for token in extended.encode("((("))
    row = np.empty(extended.mask_words, np.int32)
    matcher.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert bits[extended.token_bytes.index(b"x)")]
    assert matcher.accept(extended.token_bytes.index(b"x)"))
    assert matcher.forced() == extended.encode("))")
    assert all(matcher.accept(token) for token in extended.encode("))"))
    assert matcher.is_finished()


def with_tokens(vocabulary: Vocabulary, data: list[bytes]) -> Vocabulary:
    tokens = [*vocabulary.token_bytes, *data]
    return replace(vocabulary, token_bytes=tokens, size=len(tokens) + 5, fingerprint="more tokens")


def test_special_tokens_are_no_text(tiny: Vocabulary) -> None:
    """A grammar of any text allows neither padding nor the end's own name, and EOS only as the end."""
    tokens = list(tiny.token_bytes)
    eos = min(tiny.eos_token_ids)
    tokens[eos] = b"<eos>"  # as a tokenizer may list it
    vocabulary = replace(tiny, token_bytes=tokens, fingerprint="eos has bytes")
    grammar = build("root ::= [^x]{1,99}", vocabulary)
    matcher = grammar.matcher()
    assert not matcher.accept(eos)
    row = np.empty(tiny.mask_words, np.int32)
    matcher.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    special = [token for token in range(tiny.size) if token >= len(tokens) or not tokens[token]]
    assert not bits[[eos, *special]].any()
    assert bits.sum() > 400


def test_an_alternative_without_an_end_is_not_offered(tiny: Vocabulary) -> None:
    grammar = build('root ::= "a" | "b" loop\nloop ::= "b" loop', tiny)
    assert allowed(grammar, tiny) == {b"a"}
    assert grammar.accepts("a")
    assert not grammar.accepts("b")


def test_nul_characters_are_characters(tiny: Vocabulary) -> None:
    grammar = build(r'root ::= "\x00" [\x00a]', tiny)
    assert grammar.accepts("\0\0")
    assert not grammar.accepts("a\0")


def test_accepts_knows_all_characters_whatever_the_vocabulary_writes(gapped: Vocabulary) -> None:
    grammar = build("root ::= [5-8]+", gapped)
    assert grammar.accepts("77")
    assert b"7" not in allowed(grammar, gapped)
    assert not grammar.accepts(b"\xff")
    assert not grammar.accepts("5\ud800")


def test_tokens_inside_characters_are_left_out_where_they_may_be_dead_ends(gapped: Vocabulary) -> None:
    """This vocabulary has bytes that begin a character which nothing completes."""
    for data in allowed(build("root ::= [^x]{1,9}", gapped), gapped):
        assert data.decode()


SLOW = "root ::= " + " ".join(['("a" | "b"){0,3}'] * 500)


@pytest.mark.parametrize(
    ("text", "limits", "codes"),
    [
        (SLOW, Limits(compile_s=0.5), {"timeout"}),
        ("root ::= " + " | ".join(f'"word{i}"' for i in range(20_000)), Limits(), {"limit"}),
        ("root ::= ((.{0,100}){0,100}){0,100}", Limits(), {"limit"}),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, Limits(), {"limit"}),
        (
            "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)), 'r60 ::= "x"']),
            Limits(),
            {"limit"},
        ),
        ("root ::= root", Limits(), {"empty"}),
        ("root ::= a\na ::= b\nb ::= a | b b", Limits(), {"empty"}),
        ('root ::= "a\0b"', Limits(), {"syntax"}),
        ('root ::= "\ud800"', Limits(), {"syntax"}),
        ('root ::= [a-z]{0,200} "."', Limits(memory_bytes=10_000), {"limit"}),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_costs_too_much_is_refused_and_the_next_grammar_compiles(
    tiny: Vocabulary, text: str, limits: Limits, codes: set[str]
) -> None:
    with pytest.raises(ConstraintError) as caught:
        build(text, tiny, limits)
    assert caught.value.code in codes
    assert build('root ::= "yes" | "no"', tiny).accepts("no")


def helper_pid(vocabulary: Vocabulary) -> int:
    build('root ::= "yes"', vocabulary)
    pid = xgrammar_engine.tokens_of(vocabulary).process.pid
    assert pid is not None
    return pid


def test_a_slow_grammar_does_not_cost_the_helper_process(tiny: Vocabulary) -> None:
    before = helper_pid(tiny)
    with pytest.raises(ConstraintError, match="CPU time"):
        build(SLOW, tiny, Limits(compile_s=0.2))
    assert helper_pid(tiny) == before


# Rules that a bounded repeat of the rule itself may stand for.
CRASHES = [
    "root ::= root{,2}",
    "root ::= a{2} | b{2}\na ::= a{,2}\nb ::= a",
    'root ::= a?\na ::= b? b{,2} "x"{2}\nb ::= b{0,3}',
    'root ::= ("y"* (b{2} | b+))?\nb ::= (b{,2})',
]


@pytest.mark.parametrize("text", CRASHES)
def test_a_grammar_that_crashes_the_library_is_refused(text: str, tiny: Vocabulary) -> None:
    before = helper_pid(tiny)
    with pytest.raises(ConstraintError, match="crashes") as caught:
        build(text, tiny)
    assert caught.value.code == "unsupported"
    assert helper_pid(tiny) == before


def test_a_crash_is_remembered(tiny: Vocabulary) -> None:
    compiler = GrammarCompiler(tiny)
    try:
        for _ in range(3):
            with pytest.raises(ConstraintError, match="crashes"):
                compiler.compile(ConstraintSpec.grammar(CRASHES[1]))
        stats = compiler.stats()
        assert (stats["refused"], stats["refusal_hits"]) == (1, 2)
    finally:
        compiler.close()


def child_of(helper: int) -> int:
    """The process in which the helper compiles now; waits for it."""
    for _ in range(6_000):
        found = Path(f"/proc/{helper}/task/{helper}/children").read_text().split()
        if found:
            return int(found[0])
        time.sleep(0.01)
    raise AssertionError("no grammar is compiled")


def test_a_killed_child_is_a_refusal_and_the_next_grammar_compiles(tiny: Vocabulary) -> None:
    before = helper_pid(tiny)
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(build, SLOW, tiny, Limits(compile_s=60))
        os.kill(child_of(before), signal.SIGKILL)
        with pytest.raises(ConstraintError, match="killed") as caught:
            slow.result(60)
    assert caught.value.code == "limit"
    assert helper_pid(tiny) == before


def test_a_grammar_that_nobody_waits_for_any_longer_ends_its_child(tiny: Vocabulary) -> None:
    before, stop = helper_pid(tiny), threading.Event()
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(build, SLOW, tiny, Limits(compile_s=60, stop=stop))
        child = child_of(before)
        stop.set()
        with pytest.raises(RequestAborted):
            slow.result(60)
    assert not Path(f"/proc/{child}").exists()
    assert helper_pid(tiny) == before


def test_a_helper_that_dies_is_started_again(tiny: Vocabulary) -> None:
    before = helper_pid(tiny)
    os.kill(before, signal.SIGKILL)
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    assert build('root ::= "again"', tiny).accepts("again")
    assert helper_pid(tiny) != before


def test_equal_grammars_are_compiled_once(tiny: Vocabulary) -> None:
    compiler = GrammarCompiler(tiny)
    spec = ConstraintSpec.grammar('root ::= "x"+')
    try:
        futures = [compiler.submit(spec) for _ in range(5)]
        assert len({id(future.result(60)) for future in futures}) == 1
        assert compiler.stats()["compiled"] == 1
        with pytest.raises(ConstraintError, match="no rule called"):
            compiler.compile(ConstraintSpec.grammar("root ::= foo"))
        with pytest.raises(ConstraintError, match="no rule called"):
            compiler.compile(ConstraintSpec.grammar("root ::= foo"))
        assert compiler.stats()["refusal_hits"] == 1
    finally:
        compiler.close()


def test_accepting_a_long_text_is_bounded_in_time(tiny: Vocabulary) -> None:
    """A grammar with very many readings of one text; the parser is asked in pieces."""
    grammar = build('root ::= root root root | "a" | ""', tiny, Limits(compile_s=0.3))
    with pytest.raises(ConstraintError, match="CPU time"):
        grammar.accepts("a" * 100_000)
    assert grammar.accepts("aa")
