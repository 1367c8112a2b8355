"""Graphs as pictures: well-formed, complete, and harmless whatever text the program has."""

from __future__ import annotations

import re
from typing import Any
from xml.dom import minidom

from hypothesis import given, settings
from hypothesis import strategies as st

from trellis.frontend import function, gen, user
from trellis.frontend.expressions import Text
from trellis.frontend.tracing.drawing import Drawing
from trellis.frontend.tracing.graph import Append, Node, Trace
from trellis.frontend.tracing.layout import layout
from trellis.frontend.tracing.stop import Stop

HOSTILE = '</title><script>alert(1)</script>"]; } \\" & \x00\x1b[31m \ud800 &lt; --> ]]>'


@function
def program(s: Any, x: str) -> None:
    s += user(f"Hello {x}")
    with s.fork(2) as branches:
        branches += lambda i: f"{i}" + gen("y")
    s += s["y"][0] + gen("z")
    if s["z"]:
        s += "more"


def texts(svg: str) -> list[str]:
    """The tooltips, which have all of a box's text, without the lines that they name."""
    page = minidom.parseString(svg.encode())
    found = ["".join(n.data for n in e.childNodes) for e in page.getElementsByTagName("title")]
    return [re.sub(r"^line \d+: ", "", each) for each in found]


def test_the_picture_has_every_node_and_the_end() -> None:
    drawing = program.graph()
    assert str(drawing) == str(program.trace())
    found = texts(drawing.svg())
    assert found[:3] == ["begin user", "text 'Hello {x}'", "end user"]
    assert found.count("gen y") == 2
    assert "text '{s[\"y\"][0]}'" in found
    assert re.search(r"straight up to here: line \d+ of .*the truth of \{s\[\"z\"\]\} depends", found[-1])
    assert drawing.html().count("<svg") == 1


def test_arrows_follow_forks_joins_and_readings() -> None:
    graph = layout(program.trace())
    label = {box.number: box.label for box in graph.boxes}
    arrows = {(label[a.source], label[a.target], a.reads) for a in graph.arrows}
    fork, join = "fork → state 1, state 2", "join ← state 1, state 2"
    assert {(fork, "text '0'", False), (fork, "text '1'", False), ("gen y", join, False)} <= arrows
    assert (join, "text '{s[\"y\"][0]}'", True) in arrows
    places = {(box.row, box.column) for box in graph.boxes}
    assert len(places) == len(graph.boxes)
    rows = {box.number: box.row for box in graph.boxes}
    assert all(rows[a.source] < rows[a.target] for a in graph.arrows)


def hostile(text: str) -> Drawing:
    nodes = (Node(0, 0, 1, Append(Text(text))), Node(1, 0, 1, Append(gen("x", stop=text or None))))
    return Drawing(Trace(text, (text,), {}, nodes, Stop(text, text, 1)))


@given(st.text() | st.just(HOSTILE))
@settings(max_examples=60, deadline=None)
def test_text_cannot_leave_its_place(text: str) -> None:
    drawing = hostile(text)
    assert len(texts(drawing.svg())) == 3
    page = drawing.html()
    page.encode()
    assert set(re.findall(r"<(/?[a-z0-9!]+)", page)) == set(
        re.findall(r"<(/?[a-z0-9!]+)", hostile("a").html())
    )
    # In DOT, every string ends on its line.
    outside = [re.sub(r'"(?:[^"\\]|\\.)*"', "", line) for line in drawing.dot().splitlines()]
    assert outside == [re.sub(r'"(?:[^"\\]|\\.)*"', "", line) for line in hostile("a").dot().splitlines()]


def test_an_empty_program_has_a_picture() -> None:
    @function
    def empty(s: Any) -> None:
        pass

    assert texts(empty.graph().svg()) == []
    assert empty.graph().dot().count("\n") == 3
