"""Whole programs on the real model: language, runtime, radix cache and constraints together."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from trellis import RuntimeEndpoint, assistant, function, gen, select, system, user

pytestmark = [pytest.mark.model]

FEW_SHOT = "".join(
    f"Q: What is the capital of {country}?\nA: {city}\n"
    for country, city in [("Italy", "Rome"), ("Spain", "Madrid"), ("Austria", "Vienna"), ("Greece", "Athens")]
)
PERSON = r'\{"name": "[A-Z][a-z]{2,10}", "age": [1-9][0-9]?, "job": "(nurse|pilot|baker)"\}'


@function
def capital(s: Any, country: str) -> None:
    s += FEW_SHOT + f"Q: What is the capital of {country}?\nA:" + gen("city", max_tokens=8, stop="\n")


@function
def everything(s: Any, topic: str) -> None:
    s += system("You answer in one short sentence.")
    s += user(f"Tell me one thing about {topic}.")
    s += assistant(gen("fact", max_tokens=24))
    branches = s.fork(2)
    for branch, question in zip(branches, ("Is it alive?", "Is it large?"), strict=True):
        branch += user(question)
        branch += assistant(select("answer", ["Yes", "No"]))
    branches.join()
    s += user("Describe a person who likes it, as JSON.")
    s += assistant(gen("person", max_tokens=64, regex=PERSON))


@pytest.fixture(scope="module")
def endpoint(server_url: str) -> RuntimeEndpoint:
    return RuntimeEndpoint(server_url)


def test_few_shot_batch_answers_and_shares_its_prefix(engine: Any) -> None:
    states = capital.run_batch(
        [{"country": c} for c in ("France", "Japan", "Germany")], backend=engine, temperature=0
    )
    assert [state["city"].strip() for state in states] == ["Paris", "Tokyo", "Berlin"]
    # The last token is computed to have what follows it; with healing it is taken back, and the one before as well.
    for healing, computed in ((True, 2), (False, 1)):
        again = capital.run(country="France", backend=engine, temperature=0, token_healing=healing)
        counts = again.meta("city").counts
        assert again["city"] == states[0]["city"]
        assert counts.cached_tokens == counts.prompt_tokens - computed


@pytest.mark.server
def test_the_same_program_gives_the_same_text_in_process_and_over_http(
    engine: Any, endpoint: RuntimeEndpoint
) -> None:
    here = everything.run(topic="oak trees", backend=engine, temperature=0)
    there = everything.run(topic="oak trees", backend=endpoint, temperature=0)
    assert here.text() == there.text()
    assert here["answer"] == there["answer"]
    assert len(here["answer"]) == 2
    assert here.messages() == there.messages()


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_constrained_gen_always_matches(engine: Any, temperature: float) -> None:
    @function
    def sheet(s: Any) -> None:
        s += "A person as JSON: " + gen("person", max_tokens=80, regex=PERSON, seed=7)

    state = sheet.run(backend=engine, temperature=temperature)
    assert re.fullmatch(PERSON, state["person"])
    assert json.loads(state["person"])["job"] in {"nurse", "pilot", "baker"}
    counts = state.meta("person").counts
    assert counts.forced_tokens > 0
    assert counts.forced_tokens + counts.sampled_tokens == counts.completion_tokens
    assert counts.forward_passes <= counts.sampled_tokens + 1


def test_a_conversation_computes_each_turn_once(engine: Any) -> None:
    @function
    def chat(s: Any) -> None:
        s += user("Name a colour, please, and say why you like it.")
        s += assistant(gen("first", max_tokens=24))
        s += user("And another one?")
        s += assistant(gen("second", max_tokens=8))

    state = chat.run(backend=engine, temperature=0)
    first, second = state.meta("first").counts, state.meta("second").counts
    # Everything up to the last token of the first answer has its K/V in the tree.
    assert second.cached_tokens >= first.prompt_tokens + first.completion_tokens - 1


def test_streamed_pieces_add_up_to_the_text(engine: Any) -> None:
    state = capital.run(country="Portugal", backend=engine, temperature=0, stream=True)
    pieces = list(state.text_iter("city"))
    assert "".join(pieces) == state["city"]
    assert state["city"].strip() == "Lisbon"
