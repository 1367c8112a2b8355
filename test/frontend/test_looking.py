"""Looking at a run: costs, timelines, notebooks, progress bars and the log."""

from __future__ import annotations

import asyncio
import logging
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trellis.errors import InvalidRequestError, ProgramError
from trellis.frontend import (
    ChatFormat,
    MockAnswer,
    MockBackend,
    Price,
    assistant,
    function,
    gen,
    select,
    system,
    timeline,
    user,
)
from trellis.frontend.backends.base import Completion, Counts
from trellis.frontend.progress import summary

HOSTILE = "</style><script>alert('x')</script>\"'&<b onmouseover=y>"
COUNTED = Completion(
    "abc def",
    (1, 2),
    counts=Counts(
        prompt_tokens=100, cached_tokens=60, completion_tokens=10, sampled_tokens=7, forced_tokens=3
    ),
    kept_tokens=2,
    forced_spans=((3, 7),),
)


@function
def branchy(s):
    s += "start " + gen("a")
    branches = s.fork(2)
    branches += gen("b")
    branches[1] += select("c", ["x", "y"])
    branches.join()
    s += gen("d")


class Page(HTMLParser):
    """Collects the tags with their attributes, the text of titles, and all other text but styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.titles: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "line"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line"):
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["title"]:
            self.titles.append(data)
        elif self._open[-1:] != ["style"]:
            self.text += data

    def of(self, tag: str, kind: str) -> list[dict[str, str | None]]:
        return [
            attrs for name, attrs in self.tags if name == tag and kind in (attrs.get("class") or "").split()
        ]


def self_contained(html: str) -> Page:
    """The page, which must load nothing and run nothing."""
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object", "b"} & {tag for tag, _ in page.tags}
    for _, attrs in page.tags:
        assert not [name for name in attrs if name.startswith("on") or name in ("src", "href")]
    assert not re.search(r"url\(|@import", html)
    return page


# -- costs ---------------------------------------------------------------------------------------------------------


def test_a_report_says_what_it_cost() -> None:
    backend = MockBackend([COUNTED, COUNTED])
    state = function(lambda s: s.__iadd__("p" + gen("x") + gen("y")) and None).run(backend=backend)
    assert state.report().cost is None
    assert "cost" not in str(state.report())
    assert "<th>cost</th>" in state.report(price=Price(0, 0))._repr_html_()
    assert [line.split()[-2:] for line in str(state.report()).splitlines()[2:4]] == [["0.000", "stop"]] * 2
    report = state.report(price=Price(prompt=2, answer=10, cached=0.5))
    each = (40 * 2 + 60 * 0.5 + 10 * 10) / 1e6
    assert [row.cost for row in report.rows] == [pytest.approx(each)] * 2
    assert report.cost == pytest.approx(2 * each)
    assert str(report).splitlines()[-1].split()[-1] == "0.000420"
    backend.price = Price(prompt=1, answer=1)
    assert state.report().cost == pytest.approx(2 * 110 / 1e6)
    assert state.report(price=Price(0, 0)).cost == 0


def test_a_price_below_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"Price.cached: must be at least 0, got -1"):
        Price(1, 1, -1)


def test_a_report_is_a_table_in_notebooks() -> None:
    state = function(lambda s: s.__iadd__("p" + gen(HOSTILE)) and None).run(backend=MockBackend("ok"))
    page = self_contained(state.report()._repr_html_())
    assert [tag for tag, _ in page.tags].count("tr") == 3
    assert HOSTILE in page.text


# -- timelines -----------------------------------------------------------------------------------------------------


def test_a_timeline_has_a_lane_for_each_branch_and_a_span_for_each_gen() -> None:
    state = branchy.run(backend=MockBackend("ok"))
    line = state.timeline()
    [run] = line.runs
    assert {lane: [span.name for span in spans] for lane, spans in run.lanes().items()} == {
        (): ["a", "d"],
        (0,): ["b"],
        (1,): ["b", "c"],
    }
    for span in line.spans:
        assert span.sent is not None
        assert span.done is not None
        assert line.start <= span.queued <= span.sent <= span.done <= line.start + line.seconds
        assert not span.failed
        assert span.first is None
    a, d = run.lanes()[()]
    assert all(a.done <= b.sent for b in (run.lanes()[(0,)][0], run.lanes()[(1,)][0]))
    assert d.queued >= max(span.done for span in line.spans if span is not d)
    page = self_contained(line.html())
    assert len(page.of("rect", "gen")) == 4
    assert len(page.of("rect", "select")) == 1
    assert [text for text in ("program", "branch 0", "branch 1") if text in page.text] == [
        "program", "branch 0", "branch 1",
    ]  # fmt: skip
    assert "5 gens and selects of 1 run" in page.text
    assert repr(line).startswith("<Timeline: 5 gens and selects of 1 run in 0.")
    assert repr(state.report()) == str(state.report())


def test_nested_branches_have_lanes_of_their_own() -> None:
    @function
    def program(s):
        s += "a"
        outer = s.fork(2)
        inner = outer[1].fork(2)
        inner += gen("x")
        inner.join()
        outer.join()
        again = s.fork(1)
        again += gen("y")
        again.join()

    state = program.run(backend=MockBackend("ok"))
    assert list(state.timeline().runs[0].lanes()) == [(1, 0), (1, 1), (2,)]


def test_a_streamed_gen_shows_when_its_first_text_came() -> None:
    state = function(lambda s: s.__iadd__("p" + gen("x")) and None).run(
        backend=MockBackend("a b"), stream=True
    )
    assert "".join(state.text_iter()) == "pa b"
    [span] = state.timeline().spans
    assert span.sent <= span.first <= span.done


def test_the_timeline_of_what_is_under_way_does_not_wait() -> None:
    backend = MockBackend(MockAnswer(latency=float("inf")))
    state = function(lambda s: s.__iadd__("p" + gen("x") + gen("y")) and None).run(
        backend=backend, stream=True
    )
    next(state.text_iter())
    while not backend.active:
        pass
    x, y = state.timeline().spans
    assert (x.done, y.sent) == (None, None)
    assert x.sent is not None
    page = self_contained(state.timeline().html())
    assert len(page.of("rect", "open")) == 2
    state.cancel()
    x, y = state.timeline().spans
    assert x.failed
    assert y.failed
    assert "RequestAborted" in self_contained(state.timeline().html()).text


def test_many_runs_share_a_page(tmp_path: Path) -> None:
    states = branchy.run_batch([()] * 3, backend=MockBackend("ok"))
    line = timeline(states)
    assert len(line.runs) == 3
    assert len(line.spans) == 15
    line.save(tmp_path / "run.html")
    html = (tmp_path / "run.html").read_text(encoding="utf-8")
    page = self_contained(html)
    assert len([text for text in ("0: branchy", "1: branchy", "2: branchy") if text in page.text]) == 3
    picture = html[html.index("<svg") : html.index("</svg>") + 6]
    assert ElementTree.fromstring(picture).tag.endswith("svg")


def test_a_timeline_of_nothing_is_a_page_too() -> None:
    assert "0 gens and selects of 0 runs" in self_contained(timeline([]).html()).text
    assert timeline([]).seconds == 0


def test_branches_of_one_program_are_drawn_once() -> None:
    groups = []

    @function
    def program(s):
        s += "a"
        branches = s.fork(2)
        branches += gen("x")
        groups.append(branches)
        branches.join()

    program.run(backend=MockBackend("ok"))
    assert len(timeline(groups[0]).spans) == 2


def test_async_states_have_timelines() -> None:
    @function
    async def program(s):
        s += "a" + gen("x")
        await s["x"]
        assert len(s.timeline().spans) == 1

    state = asyncio.run(program.run_async(backend=MockBackend("ok")))
    assert [span.name for span in timeline([state]).spans] == ["x"]
    assert "ok" in Page(state._repr_html_()).text


def test_hostile_names_and_texts_are_escaped_on_the_page() -> None:
    def body(s):
        s += HOSTILE + gen(HOSTILE)

    body.__name__ = HOSTILE
    state = function(body).run(backend=MockBackend(HOSTILE))
    page = self_contained(state.timeline().html())
    assert any(HOSTILE in title for title in page.titles)
    assert HOSTILE in page.text


# -- notebooks -----------------------------------------------------------------------------------------------------

CHAT = ChatFormat({role: (f"<{role}>", "<end>\n") for role in ("system", "user", "assistant")})


def test_a_state_in_a_notebook_shows_roles_and_who_wrote_what() -> None:
    @function
    def program(s):
        s += system("Be brief.")
        s += user("Hi")
        s += assistant("Well: " + gen("x") + ", " + select("y", ["yes", "no"]))

    backend = MockBackend([COUNTED], scores={"yes": -1.0, "no": -2.0}, chat_format=CHAT)
    page = self_contained(program.run(backend=backend)._repr_html_())
    assert [page.of("div", kind) != [] for kind in ("system", "user", "assistant", "other")] == [True] * 3 + [
        False
    ]
    assert [len(page.of("span", kind)) for kind in ("sampled", "forced", "selected")] == [1, 1, 1]
    titles = [attrs["title"] for tag, attrs in page.tags if tag == "span" and attrs.get("title")]
    assert titles[0].startswith("gen x\n100 prompt tokens, 60 of them cached\n7 sampled, 3 forced")
    assert re.search(r"select y\n(.*\n)*'yes': 0.731\n'no': 0.269$", titles[1])
    assert "Well: abc def, yes" in page.text


def test_hostile_text_is_escaped_in_notebooks() -> None:
    def body(s):
        s += HOSTILE
        s += user(HOSTILE + gen(HOSTILE))
        s.set(HOSTILE, HOSTILE)

    state = function(body).run(backend=MockBackend(HOSTILE))
    page = self_contained(state._repr_html_())
    assert page.text.count(HOSTILE) >= 3


def test_what_is_under_way_and_what_failed_is_shown_without_waiting() -> None:
    async def answer(_request):
        await asyncio.Event().wait()

    @function
    def program(s):
        s += user("Hi")
        s += assistant("so far " + gen("x"))

    backend = MockBackend(answer)
    state = program.run(backend=backend, stream=True)
    while not backend.active:
        pass
    page = self_contained(state._repr_html_())
    assert "so far " in page.text
    assert "running" in page.text
    state.cancel("because <of> me")
    page = self_contained(state._repr_html_())
    assert "because <of> me" in page.text
    assert "so far " in page.text


def test_the_text_of_a_stream_is_shown_before_it_is_whole() -> None:
    class Halting(MockBackend):
        async def stream(self, request):
            async for chunk in super().stream(request):
                yield chunk
                await asyncio.Event().wait()

    state = function(lambda s: s.__iadd__("p:" + gen("x")) and None).run(
        backend=Halting("one two"), stream=True
    )
    for piece in state.text_iter():
        if "one" in piece:
            break
    page = self_contained(state._repr_html_())
    assert len(page.of("span", "partial")) == 1
    assert "p:one" in page.text
    state.cancel()


# -- progress ------------------------------------------------------------------------------------------------------


def test_the_bar_says_how_fast_what_was_cached_and_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [COUNTED, COUNTED, ValueError("no")]
    program = function(lambda s: s.__iadd__("p" + gen("x")) and None)
    states = program.run_batch([()] * 3, backend=MockBackend(answers), progress_bar=True, on_error="return")
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert re.search(r"[\d,]+ tok/s, 60% cached, 1 failed", shown)
    assert summary(states, 2.0) == "10 tok/s, 60% cached, 1 failed"
    assert summary([], 0.0) == "0 tok/s"


def test_the_bar_of_an_async_batch_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    @function
    async def program(s):
        s += "p" + gen("x")
        await s["x"]

    asyncio.run(program.run_batch_async([()] * 2, backend=MockBackend([COUNTED] * 2), progress_bar=True))
    assert re.search(r"2/2.*tok/s, 60% cached", capsys.readouterr().err, re.DOTALL)


# -- the log -------------------------------------------------------------------------------------------------------


def test_nothing_is_logged_unless_the_program_asks_for_it(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ProgramError):
        function(lambda s: s.__iadd__("p" + gen("x")) and None).run(backend=MockBackend(ValueError("no")))
    assert capfd.readouterr() == ("", "")
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("trellis").handlers)


def test_each_request_and_each_failure_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    @function
    def program(s):
        s += "p" + gen("x")
        branches = s.fork(2)
        branches[1] += gen("y")
        branches.join()

    with caplog.at_level(logging.DEBUG, logger="trellis"), pytest.raises(ProgramError):
        program.run(backend=MockBackend([COUNTED, ValueError("no luck")]))
    lines = [record.getMessage() for record in caplog.records if record.name == "trellis.frontend"]
    assert lines[0] == "program: gen x sent, prompt of 1 pieces"
    assert re.fullmatch(
        r"program: gen x done \(stop\) in \d+\.\d{3} s: prompt 100, cached 60, sampled 7, forced 3", lines[1]
    )
    assert lines[2] == "program: gen y of branch 1 sent, prompt of 2 pieces"
    assert lines[3] == "program failed in 'y': ValueError: no luck"
    assert {record.levelname for record in caplog.records if record.name == "trellis.frontend"} == {"DEBUG"}
