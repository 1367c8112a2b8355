"""What every engine promises: the invariants of masks, steps, forced runs and ends, through the contract only."""

from __future__ import annotations

import json
import random
import re
import threading
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from trellis.errors import ConstraintError
from trellis.fsm import (
    ConstraintSpec,
    Grammar,
    Limits,
    Matcher,
    Vocabulary,
    backend_names,
    compile_grammar,
    syntax,
)
from trellis.fsm.regex import Regex

RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck))

REGEXES = [
    r"[a-z]+",
    r"\d{4}-\d{2}-\d{2}",
    r'\{"name": "[^"\n]{1,20}", "age": \d{1,3}, "house": "(Gryffindor|Slytherin)"\}',
    r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)",
    r"(yes|no|maybe)?",
    r".{0,1000}",
    r"[東京大阪 ]{2,5}、(漢字|한국어)",
    r"(?i)straße|größe",
    r"the name of the city is (Paris|東京)",
    r"(😀|😁)+🎉",
    r"(ab|a|aabb)*b{2,4}",
    r"def gen\(s\):\n {4}return \[[a-z, ]*\]\n",
    r"x{3,7}y?",
    r"\n\n\S+",
    r"(?=.*\d)(?=.*[a-zé])(?!.*\.\.)[^\n]{3,8}",
    r"(?:(?!the).)*the end\b.?",
    r"(?:\b[a-z東é]{1,5}\b ?){2}(?<=[a-é][a-zé])",
]
CHOICES = [
    ["north", "south", "east", "west"],
    ["a", "ab", "abc", "abcd", "b"],
    ["Paris", "Paris is", "the population", "東京", "大阪", "café", "caf"],
    ["yes"],
    ["", "maybe"],
]
GBNF = [
    'root ::= "(" root ")" | "x" | root "+" root',
    'root ::= "the name of the city" tail\ntail ::= " is " [A-Z] [a-z]{1,9} | tail "; the area" | ""',
    'root ::= value\nvalue ::= "[" (value (", " value)*)? "]" | "\\"" [^"\\n]{0,9} "\\"" | ("é" | "è") | [0-9]+',
    'root ::= "a" root "b" | "東京" | dead\ndead ::= "x" dead',
]
LARK = [
    'start: NAME " = " sum\nsum: term ("+" term)*\nterm: NUMBER | "(" sum ")"\nNAME: /[a-zé]{1,4}/\nNUMBER: /[0-9]{1,3}/',
    'start: "the name of the city is " (CITY | "大阪") ["; the area is " KM]\nCITY: "Paris" | "東京"\nKM: /[0-9]+/ " km2"',
    'start: "[" [start (", " start)*] "]" | "yes"',
]
SCHEMAS: list[tuple[Any, str]] = [
    (
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 3},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "house": {"enum": ["Gryffindor", "Größe", 'a "b"\n']},
            },
            "required": ["name", "age", "house"],
            "additionalProperties": False,
        },
        spacing,
    )
    for spacing in ("spaced", "compact", "any")
]
SCHEMAS += [
    ({"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"const": None}]}, "maxItems": 3}, "spaced")
]
SPECS = [
    *(ConstraintSpec.regex(r) for r in REGEXES),
    *(ConstraintSpec.choices(c) for c in CHOICES),
    *(ConstraintSpec.grammar(g) for g in [*GBNF, *LARK]),
    *(ConstraintSpec.schema(schema, spacing) for schema, spacing in SCHEMAS),
]


@pytest.fixture(params=[name for name in backend_names() if name != "auto"])
def backend(request: pytest.FixtureRequest) -> str:
    needs = {"xgrammar": "xgrammar", "outlines": "outlines_core"}
    if request.param in needs:
        pytest.importorskip(needs[request.param], reason="an engine whose package is not installed")
    return request.param


@pytest.fixture(params=["tiny", "gapped", pytest.param("model_vocabulary", marks=pytest.mark.model)])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=SPECS, ids=lambda spec: f"{spec.kind}:{spec.source[:30]}")
def grammar(request: pytest.FixtureRequest, vocabulary: Vocabulary, backend: str) -> Grammar:
    return shared(request.param, vocabulary, backend)


@lru_cache(maxsize=512)
def shared(spec: ConstraintSpec, vocabulary: Vocabulary, backend: str) -> Grammar:
    """One for all tests: to be used by many requests is what a grammar is for."""
    return build(spec, vocabulary, backend)


def refused_by_name(error: ConstraintError, backend: str) -> bool:
    """An index of all transitions may also be too large."""
    return error.code in ("unsupported", "empty") or (backend == "outlines" and error.code == "limit")


def compiled(spec: ConstraintSpec, vocabulary: Vocabulary, backend: str) -> Grammar:
    """By an engine that knows only grammars: as a grammar of the same language."""
    if backend == "xgrammar" and spec.kind in ("regex", "choices"):
        spec = ConstraintSpec.grammar(as_gbnf(spec))
    return compile_grammar(spec, vocabulary, backend)


def as_gbnf(spec: ConstraintSpec) -> str:
    pattern = spec.source
    if spec.kind == "choices":
        pattern = "|".join(map(re.escape, json.loads(spec.source)))
    tree = Regex(pattern, Limits()).tree(syntax.Builder())
    rules: dict[int, str] = {}
    for node in syntax.walk(tree):
        rules[node.uid] = f"n{node.uid} ::= {body_of(node)}"
    return "\n".join([f"root ::= n{tree.uid}", *rules.values()])


def body_of(node: syntax.Node) -> str:
    if isinstance(node, syntax.Chars):
        return "[" + "".join(f"\\U{lo:08x}-\\U{hi:08x}" for lo, hi in node.ranges) + "]"
    if isinstance(node, syntax.Rep):
        return f"n{node.body.uid}{{{node.lo},{'' if node.hi == syntax.INF else node.hi}}}"
    assert isinstance(node, (syntax.Cat, syntax.Alt))
    if not node.parts:  # the empty text, or no text at all
        return '""' if isinstance(node, syntax.Cat) else f"n{node.uid}"
    return (" " if isinstance(node, syntax.Cat) else " | ").join(f"n{part.uid}" for part in node.parts)


def build(spec: ConstraintSpec, vocabulary: Vocabulary, backend: str) -> Grammar:
    try:
        return compiled(spec, vocabulary, backend)
    except ConstraintError as error:
        if refused_by_name(error, backend):
            pytest.skip(str(error))
        raise


def build_or_discard(regex: str, vocabulary: Vocabulary, backend: str) -> Grammar:
    """For random patterns: those that are refused by name are no example."""
    try:
        return compiled(ConstraintSpec.regex(regex), vocabulary, backend)
    except ConstraintError as error:
        assume(not refused_by_name(error, backend))
        raise


def mask_of(matcher: Matcher, vocabulary: Vocabulary) -> np.ndarray:
    """bool [size] of what is allowed; the bits past the vocabulary must be zero."""
    row = np.full(vocabulary.mask_words, -1, np.int32)
    assert matcher.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little").astype(bool)
    assert not bits[vocabulary.size :].any()
    return bits[: vocabulary.size]


def walk(matcher: Matcher, vocabulary: Vocabulary, rng: random.Random, steps: int) -> list[int]:
    """Accept random allowed tokens until EOS or for a number of steps; every mask on the way has a choice."""
    tokens: list[int] = []
    eos = min(vocabulary.eos_token_ids)
    for _ in range(steps):
        allowed = np.flatnonzero(mask_of(matcher, vocabulary)).tolist()
        assert allowed, "a state without a way on"
        token = eos if eos in allowed and rng.random() < 0.3 else rng.choice(allowed)
        assert matcher.accept(token)
        tokens.append(token)
        if token in vocabulary.eos_token_ids:
            break
    return tokens


def text_of(tokens: list[int], vocabulary: Vocabulary) -> bytes:
    return b"".join(vocabulary.token_bytes[t] for t in tokens if t not in vocabulary.eos_token_ids)


def check_mask_is_accept(matcher: Matcher, vocabulary: Vocabulary) -> None:
    allowed = mask_of(matcher, vocabulary)
    finished, accepting = matcher.is_finished(), matcher.is_accepting()
    for token in [*range(vocabulary.size), -1, vocabulary.size, vocabulary.size + 100]:
        inside = 0 <= token < vocabulary.size
        taken = matcher.accept(token)
        assert taken == (inside and bool(allowed[token])), token
        if taken:
            if token not in vocabulary.eos_token_ids:
                assert mask_of(matcher, vocabulary).any(), "an allowed token leads to a dead end"
            matcher.rollback(1)
    assert np.array_equal(mask_of(matcher, vocabulary), allowed)
    assert (matcher.is_finished(), matcher.is_accepting()) == (finished, accepting)


def check_ends(matcher: Matcher, vocabulary: Vocabulary) -> None:
    allowed = mask_of(matcher, vocabulary)
    eos = sorted(vocabulary.eos_token_ids)
    assert all(bool(allowed[token]) == matcher.is_accepting() for token in eos)
    assert matcher.is_finished() == (matcher.is_accepting() and allowed.sum() == len(eos))
    if matcher.is_accepting():
        assert not matcher.forced()


def check_forced(matcher: Matcher, grammar: Grammar, tokens: list[int], vocabulary: Vocabulary) -> None:
    """Jumping and stepping agree, and at each forced position the mask holds that one token."""
    run = matcher.forced()
    stepped, jumped = grammar.matcher(), grammar.matcher()
    assert all(map(stepped.accept, tokens))
    assert all(map(jumped.accept, tokens))
    for i, token in enumerate(run):
        assert np.flatnonzero(mask_of(stepped, vocabulary)).tolist() == [token]
        assert stepped.forced() == run[i:]
        assert not stepped.is_accepting()
        assert stepped.accept(token)
    assert all(map(jumped.accept, run))
    assert np.array_equal(mask_of(stepped, vocabulary), mask_of(jumped, vocabulary))
    assert stepped.forced() == jumped.forced()
    assert stepped.is_accepting() == jumped.is_accepting()


def check_draft(matcher: Matcher, vocabulary: Vocabulary) -> None:
    """A draft is allowed as far as it goes, there is none where tokens are forced, and asking moves nothing."""
    allowed = mask_of(matcher, vocabulary)
    draft = matcher.draft()
    assert not (draft and matcher.forced())
    accepted = 0
    while accepted < len(draft) and matcher.accept(draft[accepted]):
        accepted += 1
    assert accepted or not draft
    matcher.rollback(accepted)
    assert np.array_equal(mask_of(matcher, vocabulary), allowed)


def test_walks_by_the_mask_end_in_accepted_texts(grammar: Grammar, vocabulary: Vocabulary) -> None:
    ended = 0
    for seed in range(12):
        tokens = walk(grammar.matcher(), vocabulary, random.Random(seed), 60)
        if tokens[-1] in vocabulary.eos_token_ids:
            ended += 1
            assert grammar.accepts(text_of(tokens, vocabulary))
    assert ended


def test_the_invariants_hold_along_random_walks(grammar: Grammar, vocabulary: Vocabulary) -> None:
    rng = random.Random(7)
    every = vocabulary.size < 2000  # looking at each token of a large vocabulary takes long
    for _ in range(2):
        matcher = grammar.matcher()
        tokens: list[int] = []
        for _ in range(6):
            check_ends(matcher, vocabulary)
            check_forced(matcher, grammar, tokens, vocabulary)
            check_draft(matcher, vocabulary)
            if every:
                check_mask_is_accept(matcher, vocabulary)
            step = walk(matcher, vocabulary, rng, 1)
            tokens += step
            if step[0] in vocabulary.eos_token_ids:
                break


@settings(RELAXED, max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize("name", ["tiny", "gapped"])
def test_the_invariants_hold_on_random_patterns(
    patterns: Any, request: pytest.FixtureRequest, backend: str, name: str, data: st.DataObject
) -> None:
    vocabulary = request.getfixturevalue(name)
    pattern = data.draw(patterns.strategy)
    grammar = build_or_discard(pattern.text, vocabulary, backend)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    matcher = grammar.matcher()
    tokens = walk(matcher, vocabulary, rng, rng.randrange(6))
    if matcher.is_finished():
        matcher.rollback(len(tokens[-1:]))
        tokens = tokens[:-1]
    check_ends(matcher, vocabulary)
    check_forced(matcher, grammar, tokens, vocabulary)
    check_mask_is_accept(matcher, vocabulary)
    tokens += walk(matcher, vocabulary, rng, 40)
    if tokens[-1:] == [min(vocabulary.eos_token_ids)]:
        text = text_of(tokens, vocabulary).decode()
        assert grammar.accepts(text)
        assert re.fullmatch(pattern.text, text)


@settings(RELAXED, max_examples=60)
@given(data=st.data())
def test_forced_runs_are_the_models_own_spelling(
    patterns: Any, tiny: Vocabulary, backend: str, data: st.DataObject
) -> None:
    """Along the canonical tokens of a matching text, what is forced is always what comes."""
    pattern = data.draw(patterns.strategy)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    grammar = build_or_discard(pattern.text, tiny, backend)
    for text in patterns.texts(pattern, rng, 5):
        if not re.fullmatch(pattern.text, text):
            continue
        check_canonical(grammar, tiny, text)


def check_canonical(grammar: Grammar, vocabulary: Vocabulary, text: str) -> int:
    ids = vocabulary.encode(text)
    matcher = grammar.matcher()
    total = 0
    for i, token in enumerate(ids):
        run = matcher.forced()
        assert run == ids[i : i + len(run)], text
        total += bool(run)
        assert matcher.accept(token)
    assert matcher.is_accepting()
    return total


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        (REGEXES[2], '{"name": "Anna Lee", "age": 31, "house": "Slytherin"}'),
        (r"the name of the city is (Paris|東京) and more", "the name of the city is 東京 and more"),
        (r"(yes|no|maybe), because [a-z ]+\.", "maybe, because abc xyz."),
        (r"\{\n {4}\"a\": \d+,\n {4}\"b\": \[\d+\]\n\}", '{\n    "a": 12,\n    "b": [7]\n}'),
        (r"(north|northern) wind and (east|sea)", "northern wind and sea"),
    ],
)
def test_forced_runs_occur_and_are_canonical(
    vocabulary: Vocabulary, backend: str, regex: str, text: str
) -> None:
    grammar = build(ConstraintSpec.regex(regex), vocabulary, backend)
    if any(text_of(vocabulary.encode(char), vocabulary) != char.encode() for char in text):
        pytest.skip("the vocabulary cannot write this text")
    assert check_canonical(grammar, vocabulary, text) > 0


def test_a_forced_run_covers_more_than_one_token(tiny: Vocabulary, backend: str) -> None:
    matcher = build(ConstraintSpec.regex(r"[ab], because of the weather: \d+"), tiny, backend).matcher()
    assert matcher.forced() == []
    assert matcher.accept(tiny.encode("a")[0])
    run = matcher.forced()
    assert len(run) > 5
    assert b", because of the weather:".startswith(text_of(run, tiny))


def test_nothing_follows_eos(vocabulary: Vocabulary, backend: str) -> None:
    matcher = build(ConstraintSpec.regex("[abc]{1,3}"), vocabulary, backend).matcher()
    eos = min(vocabulary.eos_token_ids)
    assert not matcher.accept(eos)
    assert matcher.accept(vocabulary.encode("b")[0])
    assert matcher.accept(eos)
    assert matcher.is_finished()
    assert not matcher.is_accepting()
    assert not mask_of(matcher, vocabulary).any()
    assert matcher.forced() == []
    assert not any(map(matcher.accept, range(vocabulary.size)))
    matcher.rollback(1)
    assert matcher.is_accepting()
    assert not matcher.is_finished()


def test_a_text_with_no_way_on_is_finished(vocabulary: Vocabulary, backend: str) -> None:
    matcher = build(ConstraintSpec.choices(["yes"]), vocabulary, backend).matcher()
    assert not matcher.is_finished()
    assert all(map(matcher.accept, vocabulary.encode("yes")))
    assert matcher.is_accepting()
    assert matcher.is_finished()
    assert np.flatnonzero(mask_of(matcher, vocabulary)).tolist() == sorted(vocabulary.eos_token_ids)


def test_rollback_restores_every_earlier_position(grammar: Grammar, vocabulary: Vocabulary) -> None:
    rng = random.Random(3)
    matcher = grammar.matcher()
    seen = [(mask_of(matcher, vocabulary), matcher.forced(), matcher.is_accepting())]
    for _ in range(8):
        if walk(matcher, vocabulary, rng, 1)[0] in vocabulary.eos_token_ids:
            matcher.rollback(1)
            break
        seen.append((mask_of(matcher, vocabulary), matcher.forced(), matcher.is_accepting()))
    with pytest.raises(ValueError, match="take back"):
        matcher.rollback(len(seen))
    while len(seen) > 1:
        n = rng.randint(1, min(3, len(seen) - 1))
        matcher.rollback(n)
        del seen[-n:]
        mask, forced, accepting = seen[-1]
        assert np.array_equal(mask_of(matcher, vocabulary), mask)
        assert (matcher.forced(), matcher.is_accepting()) == (forced, accepting)


def test_threads_share_a_grammar(tiny: Vocabulary, backend: str) -> None:
    """Matchers of one grammar in several threads see what a matcher alone sees."""
    spec = ConstraintSpec.regex(r'(\{"[a-z]{1,9}": "[^"\n]{0,40}"(, \d+)?\}|[東京大阪]+){1,9}')
    walks: dict[int, list[int]] = {}
    failures: list[BaseException] = []
    shared = build(spec, tiny, backend)

    def run(seed: int) -> None:
        try:
            walks[seed] = walk(shared.matcher(), tiny, random.Random(seed), 40)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for seed, tokens in walks.items():
        assert tokens == walk(build(spec, tiny, backend).matcher(), tiny, random.Random(seed), 40)
