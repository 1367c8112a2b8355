"""`trellis cache show`: a tree as text, SVG and HTML, whatever stands in it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from trellis import cache_command, cli
from trellis.cache_picture import html, svg, text
from trellis.cache_tree import ago, printable, read_tree

HOSTILE = "</code></details><script>alert('1')</script><![CDATA[ ]]> &amp; {y} \x1b[31m\u202e\x00\ud83d\n"


def node(number: int, parent: int | None, said: str | None, **more: Any) -> dict[str, Any]:
    ids = None if said is None else [*said.encode(errors="replace")]
    facts = {"depth": 0, "length": len(ids or [1, 2]), "locks": 0, "hits": 1, "children": 0, "namespace": ""}
    return {
        "id": number,
        "parent": parent,
        "text": said,
        "token_ids": ids,
        "idle_s": 5.0,
        "age_s": 9.0,
        **facts,
        **more,
    }


def answer(*nodes: dict[str, Any], total: int | None = None) -> dict[str, Any]:
    sizes = {"tokens": 1234, "protected_tokens": 5, "namespaces": 1, "page_size": 1, "policy": "lru"}
    return {"nodes": len(nodes) if total is None else total, "shown": list(nodes), **sizes}


SMALL = answer(
    node(0, None, "You are", children=4, locks=2, hits=7),
    node(1, 0, " brief."),
    node(2, 0, " kind."),
    node(3, None, None, namespace="0badcafe"),
    total=90,
)


class Tags(HTMLParser):
    """What a browser would see: the tags, which must close each other, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.said = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said += data


def test_the_text_shows_who_continues_whom_and_what_is_left_out() -> None:
    lines = text(read_tree(SMALL)).splitlines()
    assert lines[0] == "90 nodes, 1,234 tokens (5 in use), 1 namespace; lru, pages of 1"
    assert lines[1:] == [
        "without a namespace",
        '  "You are"  7 tok · 7 hits · idle 5.0 s · 2 in use',
        '    " brief."  7 tok · 1 hit · idle 5.0 s',
        '    " kind."  6 tok · 1 hit · idle 5.0 s',
        "    … 2 more",
        "namespace #0badcafe",
        "  (secret)  2 tok · 1 hit · idle 5.0 s",
        "86 nodes of the cache are not shown (--max-nodes, --namespace)",
    ]


def test_the_pictures_say_the_same() -> None:
    tree = read_tree(SMALL)
    root = ElementTree.fromstring(svg(tree))
    said = " ".join(root.itertext())
    page = Tags(html(tree))
    for part in ('"You are"', '" kind."', "… 2 more", "#0badcafe", "(secret)", "86 nodes", "2 in use"):
        assert part in said
        assert part in page.said
    assert page.open == []


def test_what_tokens_say_can_not_break_out() -> None:
    tree = read_tree(answer(node(0, None, HOSTILE, children=1), node(1, 0, HOSTILE, namespace=HOSTILE)))
    plain = ElementTree.fromstring(svg(tree))
    assert {element.tag.rpartition("}")[2] for element in plain.iter()} == {"svg", "rect", "text", "tspan"}
    page = Tags(html(tree))
    assert page.open == []
    assert "script" not in page.seen
    for drawn in (text(tree), "".join(plain.itertext()), page.said):
        assert all(c.isprintable() or c == "\n" for c in drawn)
        assert "</code></details><script>" in drawn, "it is shown, as text"


def test_an_answer_of_another_kind_is_an_error_and_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong: list[Any] = [{}, [], None, {**SMALL, "shown": [{"id": 1}]}, answer(node(0, 7, "x"))]
    wrong.append(answer(node(0, None, "x", length="{y}", idle_s="</i>")))
    for reply in wrong:
        monkeypatch.setattr(cache_command, "call_server", lambda *_, reply=reply: reply)
        assert cli.main(["cache", "show", "--format", "svg"]) == 1
        assert "did not answer as /cache/tree" in capsys.readouterr().err


def test_a_page_that_is_no_json_is_an_error_and_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import httpx

    page = httpx.Response(200, text="<html>welcome</html>", request=httpx.Request("GET", "http://elsewhere"))
    monkeypatch.setattr(httpx, "request", lambda *_, **__: page)
    assert cli.main(["cache", "show", "--url", "elsewhere"]) == 1
    assert "http://elsewhere/cache/tree answered no JSON: '<html>" in capsys.readouterr().err


def test_long_texts_are_cut_and_say_so() -> None:
    long = text(read_tree(answer(node(0, None, "a" * 500))))
    assert '…"  500 tok' in long
    assert len(long.splitlines()[2]) < 120
    cut_by_the_server = text(read_tree(answer(node(0, None, "abc", length=900))))
    assert '"abc…"  900 tok' in cut_by_the_server


@pytest.mark.parametrize("shape", ["deep", "wide"])
def test_five_hundred_nodes_deep_or_wide(shape: str) -> None:
    def parent(i: int) -> int | None:
        return None if i == 0 else i - 1 if shape == "deep" else 0

    nodes = [
        node(i, parent(i), f"n{i}", children=500 if i == 0 and shape == "wide" else 1) for i in range(500)
    ]
    tree = read_tree(answer(*nodes))
    assert text(tree).count('"n') == 500
    root = ElementTree.fromstring(svg(tree))
    assert 0 <= max(float(box.get("x", 0)) for box in root.iter() if box.tag.endswith("rect")) < 600
    assert Tags(html(tree)).open == []


def test_printable_shows_what_is_there() -> None:
    assert printable("a\n\t\\é中😀") == "a\\n\\t\\\\é中😀"
    assert printable("\x1b\u202e\u2028\x7f\ud800") == "\\x1b\\u202e\\u2028\\x7f\\ud800"


def test_durations_are_short() -> None:
    assert [ago(s) for s in (0, 9.94, 59, 90, 3_600, 200_000, 10**6)] == [
        "0.0 s",
        "9.9 s",
        "59 s",
        "1.5 min",
        "1.0 h",
        "2.3 d",
        "12 d",
    ]


def test_the_file_name_says_the_format(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(cache_command, "call_server", lambda *arguments: asked.append(arguments[-1]) or SMALL)
    starts = {"svg": "<svg", "html": "<!DOCTYPE", "json": "{", "txt": "90 nodes"}
    for name, start in starts.items():
        path = tmp_path / f"tree.{name}"
        arguments = ["--output", str(path), "--max-nodes", "7", "--namespace", "#0badcafe"]
        assert cli.main(["cache", "show", *arguments]) == 0
        assert path.read_text().startswith(start)
    assert asked[0] == {"limit": 7, "namespace": "0badcafe"}
    assert cli.main(["cache", "show", "--output", str(tmp_path / "no" / "such.svg")]) == 2


def test_a_file_of_an_unknown_kind_is_refused_before_the_server_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(cache_command, "call_server", lambda *arguments: asked.append(arguments) or SMALL)
    path = tmp_path / "tree.pdf"
    assert cli.main(["cache", "show", "-o", str(path)]) == 2
    assert ".svg, .html, .json, or give --format" in capsys.readouterr().err
    assert not asked
    assert cli.main(["cache", "show", "-o", str(path), "--format", "text"]) == 0
    assert path.read_text().startswith("90 nodes")


def test_a_namespace_without_nodes_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache_command, "call_server", lambda *_: answer(total=90))
    assert cli.main(["cache", "show", "--namespace", "#12345678"]) == 2
    assert "nothing is cached under '#12345678'" in capsys.readouterr().err
    assert cli.main(["cache", "show", "--namespace", ""]) == 0, "what has no namespace may be empty"


@pytest.mark.model
@pytest.mark.server
def test_a_server_shows_what_it_was_asked(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    import httpx

    for salt, question in (("", "Name a colour of the rainbow"), ("open sesame", "My name is Ali Baba")):
        body = {"text": question, "sampling_params": {"max_new_tokens": 1}, "cache_salt": salt}
        httpx.post(f"{server_url}/generate", json=body, timeout=60).raise_for_status()
    assert cli.main(["cache", "show", "--url", server_url, "--max-nodes", "5000"]) == 0
    shown = capsys.readouterr().out
    assert "Name a colour of the rainbow" in shown
    assert "namespace #" in shown
    assert "Ali Baba" not in shown
    assert "sesame" not in shown
    assert cli.main(["cache", "show", "--url", server_url, "--format", "json", "--namespace", ""]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert {each["namespace"] for each in tree["shown"]} == {""}
