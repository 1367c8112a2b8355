"""Where a text fails and what was expected there, and how much of it would be forced."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from trellis.errors import ConstraintError
from trellis.fsm import ConstraintSpec, Limits, Vocabulary, compile_grammar
from trellis.fsm.automaton import DEAD, START
from trellis.fsm.compressed import byte_automaton
from trellis.fsm.diagnose import describe, trace

RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck))
SHEET = r'\{"name": "[A-Z][a-z]+", "age": (0|[1-9][0-9]?)\}'


@pytest.mark.parametrize(
    ("pattern", "text", "at", "words"),
    [
        (SHEET, '{"name": "Anna", "age": -1}', 24, "[0-9]"),
        (SHEET, '{"name": "Anna", "age": 01}', 25, '"}"'),
        (SHEET, '{"name": "Anna"', 15, "',␣\"age\":'"),
        (SHEET, "", 0, '{"'),
        (SHEET, '{"name": "anna"}', 10, "[A-Z]"),
        ("[a-c]x?", "bz", 1, '"x" or the end of the text'),
        ("abc", "abcd", 3, "the end of the text"),
        ("[éèx]", "z", 0, '"x" or a character that begins with byte C3'),
        ("[éè]", "ê", 1, "the rest of a character"),
        (r"x\w", "x-", 1, "some characters that are not ASCII"),
        ("日本(語|人)", "日本国", 6, "a character that begins with"),
    ],
)
def test_the_place_and_what_was_expected(
    tiny: Vocabulary, pattern: str, text: str, at: int, words: str
) -> None:
    found = trace(compile_grammar(ConstraintSpec.regex(pattern), tiny), tiny, text)
    assert found.failure is not None
    assert found.failure.at == at
    assert words in describe(found.failure)


def test_an_accepted_text_has_its_forced_tokens_counted(tiny: Vocabulary) -> None:
    text = '{"name": "Anna", "age": 31}'
    found = trace(compile_grammar(ConstraintSpec.regex(SHEET), tiny), tiny, text)
    assert found.failure is None
    assert found.tokens == len(tiny.encode(text))
    assert 0 < found.forced < found.tokens
    everything = trace(compile_grammar(ConstraintSpec.regex("the name"), tiny), tiny, "the name")
    assert everything.forced == everything.tokens
    nothing = trace(compile_grammar(ConstraintSpec.regex(".*"), tiny), tiny, text)
    assert nothing.forced == 0


def test_a_text_that_the_vocabulary_cannot_write(gapped: Vocabulary) -> None:
    found = trace(compile_grammar(ConstraintSpec.regex(r"\d+"), gapped), gapped, "172")
    assert found.failure is not None
    assert found.failure.at == 1
    assert ord("2") in found.failure.expected
    assert ord("7") not in found.failure.expected


@settings(RELAXED, max_examples=60)
@given(data=st.data())
def test_the_place_is_the_first_byte_that_no_match_has(
    patterns: object, tiny: Vocabulary, data: st.DataObject
) -> None:
    """The oracle is the automaton, byte by byte; at forced positions both know the same one way on."""
    pattern = data.draw(patterns.strategy)  # type: ignore[attr-defined]
    text = data.draw(st.text("abcxyzK01 _-é漢\n", max_size=8))
    spec = ConstraintSpec.regex(pattern.text)
    try:
        grammar = compile_grammar(spec, tiny)
    except ConstraintError as error:
        assume(error.code not in ("unsupported", "empty"))
        raise
    automaton = byte_automaton(spec, Limits())
    state, at, encoded = START, 0, text.encode()
    while at < len(encoded) and (reached := automaton.step(state, encoded[at : at + 1])) != DEAD:
        state, at = reached, at + 1
    found = trace(grammar, tiny, text)
    if at == len(encoded) and automaton.accepting(state):
        assert found.failure is None
        return
    assert found.failure is not None
    assert found.failure.at == at
    assert found.failure.expected <= set(automaton.live_bytes(state))
    assert found.failure.may_end <= automaton.accepting(state)
    if automaton.only_byte(state) >= 0:
        assert found.failure.expected == {automaton.only_byte(state)}
