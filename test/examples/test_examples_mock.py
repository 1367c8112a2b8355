"""Every example runs without a model; its programs do what they say with the answers that they get."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from trellis.frontend import Meta, MockBackend, set_default_backend
from trellis.frontend.backends.base import Counts


def use(answers, **options) -> MockBackend:
    backend = MockBackend(answers, **options)
    set_default_backend(backend)
    return backend


def test_api_backends(example, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("api_backends")

    def answer(request):
        return '{"moons": 2, "kind": "rock"}' if request.constraint else " 2\n"

    backend = use(answer, scores={"yes": -1.0, "no": -2.0})
    state = module.main("Mars")
    assert state["record"] == module.Planet(moons=2, kind="rock")
    assert state["standing"] == "yes"
    assert module.main("Mars", completions=True)["moons"] == " 2"
    assert [request.spec_tokens for request in backend.requests] == [0, 0, 24, 24]
    assert "total" in capsys.readouterr().out


def test_quickstart(example, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("quickstart")
    card = '{"title": "First throws", "minutes": 15, "level": "easy"}'

    def answer(request):
        return card if request.constraint else "Begin with one ball. Then two."

    backend = use(answer, scores={"A": -2.0, "B": -1.0})
    state = module.main()
    assert state["better"] == "B"
    assert state["tip"] == ["Begin with one ball"] * 2
    assert json.loads(state["card"])["minutes"] == 15
    assert backend.peak == 2  # the branches run side by side
    shown = capsys.readouterr().out
    assert "I would choose B." in state.text()
    for step in module.STEPS:
        assert f"\n{step}: " in shown
    assert "branch 1 | Begin with one ball\n" in shown
    assert "A 27%, B 73%" in shown
    assert shown.count("0 tokens cached") == 5
    for heading in ("cached", "sampled", "forced", "seconds"):
        assert heading in shown


def test_multi_turn_chat(example) -> None:
    module = example("multi_turn_chat")
    backend = use("An answer.")
    state = module.main()
    assert [m["role"] for m in state.messages()] == ["system"] + ["user", "assistant"] * 3
    assert [len(r.prompt) for r in backend.requests] == [1, 3, 5]  # the earlier answers go along as tokens


def test_few_shot_batch(example) -> None:
    module = example("few_shot_batch")
    use(lambda r: " City of " + re.findall(r"Country: (\w+)", r.prompt[0])[-1] + "\n\nCountry: more")
    states = module.main()
    assert [s["capital"] for s in states] == [f" City of {c}" for c in module.COUNTRIES]


def test_parallel_tips(example) -> None:
    module = example("parallel_tips")
    backend = use(lambda r: "About " + r.prompt[0].rsplit(" on ")[-1].split("?")[0] + ". More.")
    state = module.main()
    assert state["tip"] == ["About food", "About sleep", "About exercise"]
    assert "So: About food. About sleep. About exercise." in state.text()
    assert backend.peak == 3


def test_compiled(example, capsys: pytest.CaptureFixture[str]) -> None:
    backend = use(lambda r: " yes" if r.sampling.max_new_tokens else "")
    plain, compiled = example("compiled").main()
    assert compiled.text() == plain.text()
    assert compiled["words"] == plain["words"] == [" yes"] * 6
    assert backend.requests[0].prompt == ("Notes on ",)
    assert len(backend.requests) == 1 + 12 + 12
    assert "state 6: gen words max_tokens=12" in capsys.readouterr().out


def test_judge(example) -> None:
    module = example("judge")

    def scores(prompt, options):
        right = "eight legs" in prompt.rsplit("Question:", 1)[1]
        return [[-1.0 if right == (option == " correct") else -3.0] for option in options]

    use(None, scores=scores)
    assert [s["verdict"] for s in module.main()] == [" correct", " wrong", " wrong"]


def test_character_sheet(example) -> None:
    module = example("character_sheet")
    sheet = """{
  "name": "Harry Potter",
  "house": "Gryffindor",
  "blood status": "Half-blood",
  "occupation": "student",
  "wand": {
    "wood": "Holly",
    "core": "Phoenix feather",
    "length": 11.0
  },
  "alive": true
}"""
    use(sheet)
    assert [s["wand"]["length"] for s in module.main()] == [11.0, 11.0]


def test_react_agent(example) -> None:
    module = example("react_agent")
    use([" I multiply.\n", "Calculate", "12 * 48\n", " I know it.\n", "Finish", "576\n"])
    state = module.main()
    assert state.return_value == "576"
    assert "Input: 12 * 48\nObservation: 576\n" in state.text()


def test_react_agent_ends_after_its_steps(example) -> None:
    module = example("react_agent")
    use([" Again.\n", "Calculate", "1 + 1\n"] * 2 + ["2\n"])
    state = module.agent.run("?", max_steps=2)
    assert state.text().count("Observation: 2") == 2
    assert state.return_value == "2"


def test_the_tool_calculates_and_refuses_everything_else(example) -> None:
    calculate = example("react_agent").calculate
    assert calculate("12 * 48\n") == 576
    assert calculate("2 + 3 * 4 - 1") == 13
    for wrong in ("__import__('os')", "2 ** 9", "'a' * 3"):
        with pytest.raises(ValueError, match="cannot calculate"):
            calculate(wrong)


def test_streaming(example, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("streaming")
    use("Once upon a time.\nThe end.")
    state = module.main()
    assert state["story"] == "Once upon a time.\nThe end."
    shown = capsys.readouterr().out
    assert shown.startswith("Once upon a time.\nThe end.\n\ntitle: Once upon a time.\n")
    assert "a fox: a story in 6 pieces" in shown


def test_forced_parts_are_marked(example, capsys: pytest.CaptureFixture[str]) -> None:
    pieces = (('{"a": ', "forced"), ("7", "sampled"), ("}", "forced"))
    example("quickstart").show("card", Meta(Counts(9, 4, 3, 1, 2, 2), 0.5, pieces=pieces))
    assert capsys.readouterr().out == (
        '     card | «{"a": »7«}»\n'
        "          | prompt: 4 tokens cached, 5 computed; output: 1 sampled, 2 forced; 0.50 s\n"
    )


def test_the_common_argument(
    example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trellis.frontend import RuntimeEndpoint

    common = example("common")
    monkeypatch.setattr("sys.argv", ["example", "--url", "http://127.0.0.1:1"])
    with common.choose_backend() as backend:
        assert isinstance(backend, RuntimeEndpoint)
        assert backend.base_url == "http://127.0.0.1:1"
    shown = capsys.readouterr()
    assert shown.out + shown.err == ""  # no model is loaded, and none is said to be


EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def run_example(name: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(
        command, stdout=options.get("stdout", subprocess.PIPE), stderr=subprocess.PIPE, text=True, timeout=120
    )


@pytest.mark.parametrize("arguments", [("--model", "/no/such/model"), ("--url", "http://127.0.0.1:1")])
def test_what_is_missing_is_said_in_one_line(arguments: tuple[str, str]) -> None:
    done = run_example("judge.py", *arguments)
    assert done.returncode == 1
    *before, last = done.stderr.splitlines()
    assert last.startswith("error: ")
    assert arguments[1] in last
    assert before == (["Loading the model ..."] if arguments[0] == "--model" else [])


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As in ``python examples/x.py | head -1``: the pipe is closed before the example writes."""
    reading, writing = os.pipe()
    os.close(reading)
    program = (
        "import sys; sys.argv = ['example', '--url', 'http://127.0.0.1:1']; "
        f"sys.path.insert(0, {str(EXAMPLES)!r}); from common import choose_backend\n"
        "with choose_backend():\n    print('much')"
    )
    with open(writing, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.stderr == ""
