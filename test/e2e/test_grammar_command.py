"""``trellis grammar``: what it prints and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trellis.cli import main

SHEET = r'\{"name": "[A-Z][a-z]+", "age": (0|[1-9][0-9]?)\}'
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name"],
    "additionalProperties": False,
}


def check(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """Exit status and standard output of ``trellis grammar check``, over the vocabulary of bytes."""
    model = () if "--model" in args else ("--model", "bytes")
    status = main(["grammar", "check", *args, *model])
    return status, capsys.readouterr().out


def test_accepted_and_rejected_texts(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = check(capsys, "--regex", SHEET, "--text", '{"name": "Ann", "age": 31}')
    assert status == 0
    assert out.startswith("compiled  regex, engine compressed, ")
    assert "26 tokens, 20 of them forced" in out
    status, out = check(capsys, "--regex", SHEET, "--text", '{"name": "Ann", "age": -1}')
    assert status == 1
    lines = out.splitlines()
    assert lines[1].endswith("at character 23 (byte 23)")
    assert lines[2].index("-1") == lines[3].index("^")
    assert lines[4].endswith("expected [0-9]")


def test_one_rejected_text_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = check(capsys, "--choices", '["yes", "no"]', "--text", "yes", "--text", "nope", "--text", "")
    assert status == 1
    assert [line.partition(" ")[0] for line in out.splitlines() if line[:1].strip()] == [
        "compiled",
        "accepted",
        "rejected",
        "rejected",
    ]
    assert "expected the end of the text" in out
    assert "ends too early, after 0 characters" in out


@pytest.mark.parametrize(
    ("kind", "text", "message", "line", "column"),
    [
        ("--regex", r"(a|b)\1x", "back-reference", r"(a|b)\1x", 5),
        ("--regex", "ab(c", "not a valid regex", "ab(c", 2),
        ("--grammar", 'root ::= "a"\n  | "b', "never closed", '  | "b', 4),
        ("--grammar", 'start: "yes" | y', "unknown name", 'start: "yes" | y', 7),
    ],
)
def test_a_refusal_marks_its_place(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    kind: str,
    text: str,
    message: str,
    line: str,
    column: int,
) -> None:
    given = text
    if kind == "--grammar":
        (tmp_path / "grammar").write_text(text)
        given = str(tmp_path / "grammar")
    status, out = check(capsys, kind, given)
    assert status == 1
    first, shown, mark = out.splitlines()
    assert message in first
    assert shown.strip() == line.strip()
    assert mark.index("^") == shown.index(line.strip()[0]) + column - (len(line) - len(line.lstrip()))


def test_a_schema_refusal_shows_the_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"properties": {"tags": tags}}))
    status, out = check(capsys, "--schema", str(file))
    assert status == 1
    assert "uniqueItems" in out.splitlines()[0]
    assert "#/properties/tags" in out.splitlines()[0]
    assert json.loads(out.splitlines()[1]) == tags
    status, out = check(capsys, "--schema", str(file), "--no-strict", "--text", '{"tags": ["a", "b"]}')
    assert status == 0
    assert "only validated in the finished text" in out
    status, out = check(capsys, "--schema", str(file), "--no-strict", "--text", '{"tags": ["a", "a"]}')
    assert status == 1
    assert "non-unique" in out


def test_instances_get_the_blanks_of_the_spacing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schema, instance = tmp_path / "schema.json", tmp_path / "instance.json"
    schema.write_text(json.dumps(SCHEMA))
    instance.write_text('{\n  "name" : "a, b: \\"c\\"",\n  "tags":["x","y"]\n}\n')
    args = ("--schema", str(schema), "--instance", str(instance))
    for spacing in ("spaced", "compact", "any"):
        status, out = check(capsys, *args, "--spacing", spacing)
        assert status == 0, out
    instance.write_text('{"tags": []}')
    status, out = check(capsys, *args)
    assert status == 1
    assert """expected 'name": "'""" in out.replace("␣", " ")


def test_mistakes_in_the_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for args in (
        ["--grammar", str(tmp_path / "missing")],
        ["--regex", "a", "--instance", str(tmp_path / "missing")],
        ["--regex", "a", "--backend", "nope"],
        ["--regex", "a", "--model", "no-such-model"],
    ):
        assert check(capsys, *args)[0] == 2
    for args in (["--regex", "a", "--choices", "[]"], [], ["--regex", "a", "--spacing", "wide"]):
        with pytest.raises(SystemExit) as caught:
            check(capsys, *args)
        assert caught.value.code == 2


@pytest.mark.model
def test_the_models_tokens_are_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grammar", "check", "--regex", SHEET, "--text", '{"name": "Anna", "age": 31}']) == 0
    assert "13 tokens, 9 of them forced (69%)" in capsys.readouterr().out


def test_show_writes_dot_and_svg(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["grammar", "show", "--regex", "(red|blue)+x"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("digraph {")
    assert '0 -> 1 [label="\\"b\\""];' in shown.out
    assert shown.err.startswith("8 states before compression, 5 after; drawn: 5 states and 7 edges")
    file = tmp_path / "picture.svg"
    assert main(["grammar", "show", "--choices", '["yes", "no"]', "--before", "-o", str(file)]) == 0
    assert "drawn: 6 states" in capsys.readouterr().err
    assert ElementTree.parse(file).getroot().tag.endswith("svg")


def test_show_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grammar", "show", "--regex", ".{0,200}", "--limit", "20", "--format", "svg"]) == 0
    shown = capsys.readouterr()
    assert "drawn: 20 states" in shown.err
    assert "--limit 20" in shown.err
    assert "the 20 nearest states of more" in shown.out


def test_show_refuses_what_has_no_automaton(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grammar", "show", "--regex", r"(a)\1"]) == 1
    assert "^" in capsys.readouterr().err
    assert main(["grammar", "show", "--regex", "a", "--limit", "0"]) == 2
    assert main(["grammar", "show", "--regex", "a", "-o", "/no/such/folder/x.svg"]) == 2
    with pytest.raises(SystemExit):
        main(["grammar", "show", "--schema", "x.json"])
