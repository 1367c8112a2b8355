"""A prompt that ends inside a token: what is written next begins with the bytes taken back, and then the text."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trellis.fsm import BeginsInside, ConstraintSpec, Grammar, Matcher, Vocabulary, compile_grammar
from trellis.fsm.healing import HealingMatcher
from trellis.fsm.longer_tokens import LongerTokens

RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=40)

RECORD = {
    "type": "object",
    "properties": {"name": {"enum": ["Anna", "Größe"]}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# (what stands before the text, its constraint; None: a free text)
CASES: list[tuple[str, ConstraintSpec | None]] = [
    ("the name of the ci", None),
    ('{"na', None),
    ("Die Stra", None),
    ('the house is {"name": "Anna", "na', ConstraintSpec.regex(r'me": "[a-z]{1,4}"\}')),
    ("the na", ConstraintSpec.regex(r"me of the city is (Paris|東京)")),
    ("the name of the ", ConstraintSpec.choices(["city", "population", "people", "c", "大阪"])),
    ("2024-11-30", ConstraintSpec.regex(r"T\d{2}:\d{2}Z?")),
    ("ab", ConstraintSpec.regex(r"(c|d|ab|x){0,3}")),
    ("schö", ConstraintSpec.regex(r"n[,.]? na(ï|i)ve")),
    ("the area ", ConstraintSpec.schema(RECORD)),
    (
        'x = {"',
        ConstraintSpec.grammar('start: WORD "\\": " NUMBER\nWORD: /[a-z]{1,4}/\nNUMBER: /[0-9]{1,3}/'),
    ),
    ("abc", ConstraintSpec.grammar('root ::= "d" root | "" | " x"')),
]


@dataclass(frozen=True)
class Scene:
    """prompt tokens, how many of them are taken back, and the matcher's grammar."""

    vocabulary: Vocabulary
    prompt: list[int]
    taken: int
    exits: tuple[int, ...]
    grammar: Grammar | None

    @property
    def data(self) -> bytes:
        return spelled(self.prompt[-self.taken :], self.vocabulary)

    def matcher(self) -> HealingMatcher:
        kept = len(self.prompt) - self.taken
        return HealingMatcher(
            self.vocabulary, self.prompt[:kept], self.prompt[kept:], self.exits, self.grammar
        )


def spelled(tokens: list[int], vocabulary: Vocabulary) -> bytes:
    """Special and unused ids stand for nothing."""
    plain = (t for t in tokens if t < len(vocabulary.token_bytes) and t not in vocabulary.eos_token_ids)
    return b"".join(vocabulary.token_bytes[token] for token in plain)


def mask_of(matcher: Matcher, vocabulary: Vocabulary) -> np.ndarray:
    row = np.zeros(vocabulary.mask_words, np.int32)
    if not matcher.fill_mask(row):
        return np.ones(vocabulary.size, bool)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little").astype(bool)
    assert not bits[vocabulary.size :].any()
    return bits[: vocabulary.size]


def cases(vocabulary: Vocabulary) -> list[tuple[str, ConstraintSpec | None]]:
    """xgrammar starts a process for each vocabulary, which takes seconds: one has to do."""
    if find_spec("xgrammar") is not None and vocabulary.fingerprint == "tiny":
        return CASES
    return [case for case in CASES if case[1] is None or "root ::=" not in case[1].source]


def scenes(vocabulary: Vocabulary) -> list[Scene]:
    """Every case, with one to three tokens taken back, and other tokens allowed at each or only at some."""
    found = []
    for prompt, spec in cases(vocabulary):
        ids = vocabulary.encode(prompt)
        grammar = None if spec is None else compile_grammar(spec, vocabulary)
        for taken in range(1, min(4, len(ids))):
            if not all(vocabulary.token_bytes[token] for token in ids[-taken:]):
                break
            for exits in {tuple(range(1, taken + 1)), (taken,)}:
                found.append(Scene(vocabulary, ids, taken, exits, grammar))
    assert len(found) > 20
    return found


@pytest.fixture(params=["tiny", "gapped"], scope="module")
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def every(vocabulary: Vocabulary) -> list[Scene]:
    return scenes(vocabulary)


def walk(matcher: Matcher, vocabulary: Vocabulary, rng: random.Random, steps: int) -> list[int]:
    """Random allowed tokens until EOS or for a number of steps; every mask on the way has a choice."""
    tokens: list[int] = []
    for _ in range(steps):
        allowed = np.flatnonzero(mask_of(matcher, vocabulary)).tolist()
        assert allowed, "a place without a way on"
        tokens.append(rng.choice(allowed))
        assert matcher.accept(tokens[-1])
        if tokens[-1] in vocabulary.eos_token_ids:
            break
    return tokens


def test_the_output_begins_with_the_bytes_taken_back_and_then_comes_the_text(every: list[Scene]) -> None:
    crossed = ended = 0
    for scene in every:
        for seed in range(4):
            tokens = walk(scene.matcher(), scene.vocabulary, random.Random(seed), 40)
            data = spelled(tokens, scene.vocabulary)
            assert data.startswith(scene.data) or scene.data.startswith(data)
            sizes = itertools.accumulate(len(spelled([token], scene.vocabulary)) for token in tokens)
            crossed += len(scene.data) not in sizes
            if tokens[-1] in scene.vocabulary.eos_token_ids and scene.grammar is not None:
                ended += 1
                assert scene.grammar.accepts(data[len(scene.data) :])
    assert crossed > 10
    assert ended > 10


def test_the_mask_is_what_is_accepted_and_no_allowed_token_is_a_dead_end(every: list[Scene]) -> None:
    rng = random.Random(3)
    for scene in every:
        matcher, vocabulary = scene.matcher(), scene.vocabulary
        for _ in range(4):
            allowed = mask_of(matcher, vocabulary)
            ends = (matcher.is_accepting(), matcher.is_finished())
            for token in [*range(vocabulary.size), -1, vocabulary.size, vocabulary.size + 100]:
                taken = matcher.accept(token)
                assert taken == (0 <= token < vocabulary.size and bool(allowed[token])), token
                if taken:
                    if token not in vocabulary.eos_token_ids:
                        assert mask_of(matcher, vocabulary).any()
                    matcher.rollback(1)
            assert np.array_equal(mask_of(matcher, vocabulary), allowed)
            assert (matcher.is_accepting(), matcher.is_finished()) == ends
            token = int(rng.choice(np.flatnonzero(allowed).tolist()))
            matcher.accept(token)
            if token in vocabulary.eos_token_ids:
                break


def test_while_bytes_are_pending_the_request_cannot_end(every: list[Scene]) -> None:
    for scene in every:
        matcher = scene.matcher()
        rng = random.Random(1)
        while matcher.pending:
            assert not matcher.is_accepting()
            assert not matcher.is_finished()
            allowed = mask_of(matcher, scene.vocabulary)
            assert not allowed[sorted(scene.vocabulary.eos_token_ids)].any()
            matcher.accept(int(rng.choice(np.flatnonzero(allowed).tolist())))


def test_forced_tokens_have_no_alternative_and_jumping_is_stepping(every: list[Scene]) -> None:
    seen = 0
    for scene in every:
        for seed in range(3):
            tokens = walk(scene.matcher(), scene.vocabulary, random.Random(seed), seed)
            stepped, jumped = scene.matcher(), scene.matcher()
            if not (all(map(stepped.accept, tokens)) and all(map(jumped.accept, tokens))):
                raise AssertionError("a walk cannot be repeated")
            run = stepped.forced()
            for i, token in enumerate(run):
                seen += 1
                assert np.flatnonzero(mask_of(stepped, scene.vocabulary)).tolist() == [token]
                assert stepped.forced() == run[i:]
                assert not stepped.is_accepting()
                assert stepped.accept(token)
            assert all(map(jumped.accept, run))
            assert np.array_equal(mask_of(stepped, scene.vocabulary), mask_of(jumped, scene.vocabulary))
            assert stepped.forced() == jumped.forced()
    assert seen > 20


def test_taking_tokens_back_leads_to_where_they_were_not_yet_accepted(every: list[Scene]) -> None:
    for scene in every:
        rng = random.Random(5)
        matcher = scene.matcher()
        tokens = walk(matcher, scene.vocabulary, rng, 8)
        back = rng.randrange(len(tokens) + 1)
        matcher.rollback(back)
        fresh = scene.matcher()
        assert all(map(fresh.accept, tokens[: len(tokens) - back]))
        assert np.array_equal(mask_of(matcher, scene.vocabulary), mask_of(fresh, scene.vocabulary))
        assert matcher.forced() == fresh.forced()
        assert (matcher.pending, matcher.is_accepting()) == (fresh.pending, fresh.is_accepting())
        with pytest.raises(ValueError, match="cannot take back"):
            matcher.rollback(len(tokens) - back + 1)


def test_the_tokens_taken_back_may_always_come_again(every: list[Scene]) -> None:
    """Unless what must follow makes another spelling the only canonical one."""
    again = 0
    for scene in every:
        matcher = scene.matcher()
        if matcher.forced() and matcher.forced() != scene.prompt[-scene.taken :][: len(matcher.forced())]:
            continue
        same = all(map(matcher.accept, scene.prompt[-scene.taken :]))
        again += same
        if same and scene.grammar is not None:
            plain = scene.grammar.matcher()
            assert matcher.is_accepting() == plain.is_accepting()
            if not (matcher.forced() or plain.forced()):
                assert np.array_equal(mask_of(matcher, scene.vocabulary), mask_of(plain, scene.vocabulary))
    assert again > 10


def test_a_forced_text_gets_its_canonical_tokens_across_the_boundary(tiny: Vocabulary) -> None:
    """The prompt ends in the middle of words; with what must follow, they are spelled as one text would be."""
    for before, text in [
        ('{"na', 'me": "Anna", "age": 31, "house": "Gryffindor"'),
        ("the name of the ci", "ty is Paris and the population is 2"),
        ("Die Größe der Stra", "ße: schön, naïve café"),
    ]:
        whole = tiny.encode(before + text + "!")
        prompt = tiny.encode(before)
        taken = next(n for n in range(len(prompt), 0, -1) if whole[: len(prompt) - n] == prompt[:-n])
        while prompt[: len(prompt) - taken + 1] == whole[: len(prompt) - taken + 1]:
            taken -= 1
        grammar = compile_grammar(
            ConstraintSpec.regex("".join("\\" + c if c in "{}.()|*+?[]" else c for c in text) + "!"), tiny
        )
        kept = len(prompt) - taken
        matcher = HealingMatcher(tiny, prompt[:kept], prompt[kept:], range(1, taken + 1), grammar)
        out: list[int] = []
        while not matcher.is_finished():
            run = matcher.forced() or [int(np.flatnonzero(mask_of(matcher, tiny))[0])]
            out += run
            assert all(map(matcher.accept, run))
        assert [*prompt[:kept], *out] == whole


def test_a_free_text_is_free_after_the_bytes_taken_back(tiny: Vocabulary) -> None:
    prompt = tiny.encode("the na")
    matcher = HealingMatcher(tiny, prompt[:-1], prompt[-1:], [1])
    row = np.zeros(tiny.mask_words, np.int32)
    assert matcher.fill_mask(row)
    assert matcher.accept(prompt[-1])
    assert not matcher.pending
    assert not matcher.fill_mask(row)
    assert matcher.is_accepting()
    assert matcher.accept(min(tiny.eos_token_ids))
    assert matcher.is_finished()


def test_tokens_without_an_alternative_need_not_be_taken_back(tiny: Vocabulary) -> None:
    prompt = tiny.encode("the name of the ci")
    none = compile_grammar(ConstraintSpec.regex("[0-9]{3}"), tiny)
    some = compile_grammar(ConstraintSpec.regex("(ty|[0-9]) is"), tiny)
    kept = len(prompt) - 1
    assert HealingMatcher(tiny, prompt[:kept], prompt[kept:], [1], none).settled == 1
    assert HealingMatcher(tiny, prompt[:kept], prompt[kept:], [1], some).settled == 0
    # Where no exit is, the tokens are as good as the prompt's own.
    assert HealingMatcher(tiny, prompt[:kept], prompt[kept:], [], some).settled == 1


def test_an_engine_that_cannot_begin_inside_a_token_allows_only_the_tokens_taken_back(
    tiny: Vocabulary,
) -> None:
    class Plain:
        """A grammar of the bare contract."""

        engine, nbytes = "plain", 0

        def __init__(self, grammar: Grammar) -> None:
            self.matcher, self.accepts, self.warnings = grammar.matcher, grammar.accepts, grammar.warnings

    grammar = Plain(compile_grammar(ConstraintSpec.regex("ty is (Paris|x)"), tiny))
    assert not isinstance(grammar, BeginsInside)
    prompt = tiny.encode("the name of the ci")
    matcher = HealingMatcher(tiny, prompt[:-1], prompt[-1:], [1], grammar)
    assert matcher.settled == 1
    assert matcher.forced()[0] == prompt[-1]
    assert all(map(matcher.accept, matcher.forced()))


@RELAXED
@given(data=st.data())
def test_spanning_is_what_the_grammar_takes_byte_by_byte(vocabulary: Vocabulary, data: st.DataObject) -> None:
    """Each token that begins with the bytes taken back: its rest begins a text if and only if it is listed."""
    _, spec = data.draw(st.sampled_from([case for case in cases(vocabulary) if case[1] is not None]))
    assert spec is not None
    grammar = compile_grammar(spec, vocabulary)
    assert isinstance(grammar, BeginsInside)
    longer = LongerTokens(vocabulary)
    stem = data.draw(st.sampled_from([b"a", b"t", b" ", b"th", b'"', b"c", b"\xc3", b"4"]))
    listed = set(grammar.spanning(stem).tolist())
    assert listed <= set(longer.of(stem).tolist())
    for token in longer.of(stem).tolist():
        rest = vocabulary.token_bytes[token][len(stem) :]
        begun = grammar.begun([token], rest)
        assert (begun is not None) == (token in listed)
        if begun is not None:
            assert mask_of(begun, vocabulary).any()


@RELAXED
@given(words=st.lists(st.binary(max_size=3), max_size=30), stem=st.binary(min_size=1, max_size=3))
def test_the_search_for_longer_tokens_agrees_with_looking_at_each(words: list[bytes], stem: bytes) -> None:
    vocabulary = Vocabulary([b"", *words], len(words) + 1, frozenset([0]), lambda _: [], "random")
    longer = LongerTokens(vocabulary)
    of = [i for i, word in enumerate(words, 1) if word.startswith(stem) and word != stem]
    assert sorted(longer.of(stem).tolist()) == of
    assert longer.exist(stem) == bool(of)
    assert sorted(longer.exactly(stem).tolist()) == [i for i, word in enumerate(words, 1) if word == stem]
