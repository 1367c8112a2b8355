"""Diagrams say what the automaton does, compressed or not, and are well-formed DOT and SVG."""

from __future__ import annotations

import random
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from trellis.errors import ConstraintError
from trellis.fsm import ConstraintSpec, Limits
from trellis.fsm.charset import EVERYTHING, category, complement, normalize, single
from trellis.fsm.compressed import byte_automaton
from trellis.fsm.dot import dot
from trellis.fsm.drawing import Diagram, draw, explore
from trellis.fsm.labels import characters, octets, quoted
from trellis.fsm.layout import arrange
from trellis.fsm.svg import svg

RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck))


def drawn(pattern: str, over_bytes: bool = False, **how: Any) -> Diagram:
    return draw(explore(byte_automaton(ConstraintSpec.regex(pattern), Limits()), over_bytes), **how)


def accepts(diagram: Diagram, codes: list[int]) -> bool:
    """Follow the edges of a diagram; at most one of them fits."""
    state, at = 0, 0
    while True:
        if at == len(codes):
            return diagram.states[state].accepting
        fitting = [
            edge
            for edge in diagram.edges
            if edge.source == state
            and len(codes) - at >= len(edge.path)
            and all(
                any(lo <= code <= hi for lo, hi in ranges)
                for code, ranges in zip(codes[at:], edge.path, strict=False)
            )
        ]
        assert len(fitting) <= 1
        if not fitting:
            return False
        state = fitting[0].target
        at += len(fitting[0].path)


@settings(RELAXED, max_examples=60)
@given(data=st.data())
def test_a_diagram_has_the_language_of_the_pattern(patterns: Any, data: st.DataObject) -> None:
    pattern, seed = data.draw(patterns.strategy), data.draw(st.integers(0, 999))
    try:
        diagrams = {
            (joined, over_bytes): drawn(pattern.text, compressed=joined, over_bytes=over_bytes)
            for joined in (False, True)
            for over_bytes in (False, True)
        }
    except ConstraintError as error:
        assume(error.code not in ("unsupported", "empty"))
        raise
    for text in patterns.texts(pattern, random.Random(seed), 6):
        expected = re.fullmatch(pattern.text, text) is not None
        for (_, over_bytes), diagram in diagrams.items():
            assert diagram.whole
            codes = list(text.encode()) if over_bytes else [ord(char) for char in text]
            assert accepts(diagram, codes) == expected, text
    for over_bytes in (False, True):
        before, after = diagrams[False, over_bytes], diagrams[True, over_bytes]
        assert len(after.states) <= len(before.states)
        assert all(edge.path and len(edge.path) == 1 for edge in before.edges)


def test_chains_become_one_edge() -> None:
    before, after = drawn('"age": (red|blue)', compressed=False), drawn('"age": (red|blue)')
    assert len(before.states) == 14
    assert [(e.source, e.target, e.label) for e in after.edges] == [
        (0, 1, "'\"age\":␣'"),
        (1, 2, '"blue"'),
        (1, 2, '"red"'),
    ]
    assert [state.accepting for state in after.states] == [False, False, True]


def test_a_state_that_accepts_ends_a_chain() -> None:
    assert [edge.label for edge in drawn("ab(cd)?").edges] == ['"ab"', '"cd"']


def test_characters_of_several_bytes_are_one_step() -> None:
    assert [edge.label for edge in drawn("[éè]x").edges] == ['[èé] "x"']
    labels = [edge.label for edge in drawn("[éè]x", over_bytes=True).edges]
    assert labels == ["byte C3", r'[\xA8\xA9] "x"']
    assert len(drawn(r"\w+").states) == 2


def test_what_is_not_drawn_is_said() -> None:
    diagram = drawn("[a-z]{1,50}", limit=10)
    assert not diagram.whole
    assert len(diagram.states) == 10
    assert [state.number for state in diagram.states if state.more] == [9]
    assert drawn("[a-z]{1,50}", limit=51).whole


def test_choices_are_drawn_too() -> None:
    automaton = byte_automaton(ConstraintSpec.choices(["north", "northern", "no"]), Limits())
    diagram = draw(explore(automaton))
    assert [edge.label for edge in diagram.edges] == ['"no"', '"rth"', '"ern"']
    assert [state.accepting for state in diagram.states] == [False, True, True, True]


@pytest.mark.parametrize(
    ("ranges", "label"),
    [
        (single(ord("a")), '"a"'),
        (single(ord('"')), "'\"'"),
        (single(10), r'"\n"'),
        (single(0), r'"\x00"'),
        (normalize([(48, 57)]), "[0-9]"),
        (normalize([(48, 57), (97, 98), (93, 93)]), r"[0-9\]ab]"),
        (complement(single(10)), "."),
        (EVERYTHING, "any character"),
        (complement(normalize([(34, 34), (10, 10)])), '[^\\n"]'),
        (category("d", ascii_only=False), r"\d"),
        (category("W", ascii_only=False), r"\W"),
        (normalize((c, c) for c in range(97, 123, 2)), "[acegikmoqsuwy]"),
    ],
)
def test_sets_of_characters_in_words(ranges: Any, label: str) -> None:
    assert characters(ranges) == label


def test_large_sets_are_named_or_cut() -> None:
    digits = category("d", ascii_only=False)
    but = tuple((lo, hi) for lo, hi in digits if lo != 48)
    assert characters(but) == r"\d but not [0-9]"
    scattered = normalize((c, c) for c in range(0x4E00, 0x4F00, 2))
    assert characters(scattered).endswith(" more]")
    assert len(characters(scattered)) < 60
    assert octets(range(0x80, 0xC0)) == r"[\x80-\xBF]"
    assert octets([0xC3]) == "byte C3"
    assert quoted('it\'s "x"\t') == r'"it' + "'" + r's␣\"x\"\t"'


def test_dot_lists_every_state_and_edge() -> None:
    diagram = drawn(r'[a-z]+"\\"(x|yz)')
    lines = dot(diagram, 'a "title"\n').splitlines()
    assert lines[0] == "digraph {"
    assert lines[-1] == "}"
    assert sum("->" in line for line in lines) == len(diagram.edges) + 1
    assert sum("doublecircle" in line for line in lines) == sum(s.accepting for s in diagram.states)
    assert any(r'label="a \"title\"\n"' in line for line in lines)
    for line in lines:  # quotes inside quotes are escaped
        assert len(re.findall(r'(?<!\\)(?:\\\\)*"', line)) % 2 == 0


@pytest.mark.parametrize(
    "pattern",
    ["a", "(ab|cd)*x", r"(\w+@[a-z]{2,3}|x*y(ab|cd)*z)+", r'\{"a": (1|2), "b": "[^"]*"\}', "(a|b){0,9}"],
)
def test_svg_draws_every_state_and_edge_without_labels_on_each_other(pattern: str) -> None:
    diagram = drawn(pattern)
    root = ElementTree.fromstring(svg(diagram, pattern))
    tags = [element.tag.rpartition("}")[2] for element in root.iter()]
    circles = len(diagram.states) + sum(state.accepting for state in diagram.states)
    assert tags.count("circle") == circles
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert sorted(filter(None, texts)) == sorted(
        [pattern, *(edge.label for edge in diagram.edges), *(str(state.number) for state in diagram.states)]
    )
    layout = arrange(diagram)
    boxes = [*layout.states, *(place for route in layout.routes for place in route.places if place.lines)]
    for i, a in enumerate(boxes):
        assert 0 <= a.x <= layout.width
        assert 0 <= a.y <= layout.height
        for b in boxes[i + 1 :]:
            beside = abs(a.x - b.x) >= (a.width + b.width) / 2
            apart = a.y + a.below <= b.y - b.above + 1e-6 or b.y + b.below <= a.y - a.above + 1e-6
            assert beside or apart or a.layer != b.layer


def test_svg_of_text_that_xml_cannot_carry() -> None:
    ElementTree.fromstring(svg(drawn("[\x00-\x08<&]\x00"), "\x00 <&>"))
