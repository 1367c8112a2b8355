"""Every example on the real model: what its constraints and its structure promise holds."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
on_the_model = pytest.mark.usefixtures("on_the_model")
EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


@on_the_model
def test_quickstart(example) -> None:
    module = example("quickstart")
    state = module.main()
    assert re.fullmatch(module.CARD, state["card"])
    card = json.loads(state["card"])
    assert set(card) == {"title", "minutes", "level"}
    assert state["better"] in ("A", "B")
    assert len(state["tip"]) == 2
    counts = state.meta("card").counts
    assert counts.forced_tokens > 0
    assert counts.cached_tokens > 0
    assert counts.sampled_tokens + counts.forced_tokens == counts.completion_tokens
    assert sum(state.meta("better").probabilities) == pytest.approx(1.0)


@on_the_model
def test_multi_turn_chat_finds_all_earlier_turns_in_the_cache(example) -> None:
    state = example("multi_turn_chat").main()
    assert [m["role"] for m in state.messages()] == ["system"] + ["user", "assistant"] * 3
    for turn in (1, 2):
        before, now = state.meta(f"answer{turn - 1}").counts, state.meta(f"answer{turn}").counts
        # All of the last prompt and of its answer, but for the answer's last token, which was never an input.
        assert now.cached_tokens >= before.prompt_tokens + before.completion_tokens - 2


@on_the_model
def test_few_shot_batch(example) -> None:
    states = example("few_shot_batch").main()
    answers = [state["capital"].strip() for state in states]
    assert answers[:3] == ["Rome", "Berlin", "Madrid"]


@on_the_model
def test_parallel_tips(example) -> None:
    state = example("parallel_tips").main()
    assert len(state["tip"]) == 3
    assert all(isinstance(tip, str) for tip in state["tip"])


@on_the_model
def test_judge(example) -> None:
    states = example("judge").main()
    assert [state["verdict"] for state in states] == [" correct", " wrong", " wrong"]
    for state in states:
        assert sum(state.meta("verdict").probabilities) == pytest.approx(1.0)


@on_the_model
def test_character_sheet(example) -> None:
    sheets = example("character_sheet").main()
    assert [set(sheet["wand"]) for sheet in sheets] == [{"wood", "core", "length"}] * 2


@on_the_model
def test_react_agent(example) -> None:
    module = example("react_agent")
    state = module.main()
    observations = re.findall(r"Input: (.*)\nObservation: (.*)\n", state.text().removeprefix(module.EXAMPLES))
    assert observations
    assert all(module.calculate(tool_input) == int(result) for tool_input, result in observations)
    assert re.fullmatch(r"-?\d{1,6}", state.return_value)


@on_the_model
def test_streaming(example) -> None:
    state = example("streaming").main()
    assert "".join(state.text_iter("story")) == state["story"] != ""
    assert "".join(state.text_iter()) == state.text()


@pytest.mark.server
def test_openai_client_starts_its_own_server() -> None:
    pytest.importorskip("openai")
    command = [sys.executable, str(EXAMPLES / "openai_client.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
