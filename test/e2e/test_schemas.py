"""Schemas and grammars on the default model: what comes back parses, validates, and says what it cost."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Annotated, Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

import trellis
from trellis.frontend.schemas import read_schema
from trellis.runtime.manager.types import GenerateInput
from trellis.runtime.messages import Constraint, SamplingParams

pytestmark = [pytest.mark.model]


ShortText = Annotated[str, Field(max_length=10)]


class Wand(BaseModel):
    wood: Literal["holly", "oak", "Ébène"]
    length_cm: int = Field(ge=10, le=50)


class Character(BaseModel):
    name: ShortText
    age: int = Field(ge=1, le=150)
    house: Literal["Gryffindor", "Slytherin"] | None
    alive: bool
    wand: Wand


CHARACTER, _ = read_schema(Character)
NAMES = ["Hermione Granger", "Dobby"]
PROMPT = "Describe {} as JSON.\n"


def ask(core: Any, *, temperature: float, jump: bool, spacing: str, n: int = 200) -> list[Any]:
    async def go() -> list[Any]:
        requests = [
            GenerateInput(
                prompt=PROMPT.format(name),
                params=SamplingParams(max_new_tokens=n, temperature=temperature, seed=i),
                constraint=Constraint("schema", CHARACTER, spacing),
                jump_forward=jump,
            )
            for i, name in enumerate(NAMES)
        ]
        return await asyncio.gather(*map(core.manager.generate, requests))

    return asyncio.run(go())


@pytest.mark.parametrize(("temperature", "spacing"), [(0.0, "spaced"), (1.5, "compact")])
def test_texts_parse_and_validate_and_jumping_changes_nothing_but_the_work(
    engine: Any, temperature: float, spacing: str
) -> None:
    jumped = ask(engine.core, temperature=temperature, jump=True, spacing=spacing)
    stepped = ask(engine.core, temperature=temperature, jump=False, spacing=spacing)
    for a, b in zip(jumped, stepped, strict=True):
        assert a.finish.type == "stop"
        jsonschema.validate(json.loads(a.text), json.loads(CHARACTER))
        assert Character.model_validate_json(a.text)
        assert a.token_ids == b.token_ids
        assert b.counts.forced_tokens == 0
        assert a.counts.forced_tokens > 0.3 * a.counts.completion_tokens
        assert a.counts.forward_passes < b.counts.forward_passes
        assert (a.grammar.engine, a.grammar.validated_only) == ("llguidance", [])
    assert engine.core.control("stats")["constraint_misses"] == 0


def test_a_program_gets_typed_values(engine: Any) -> None:
    @trellis.function
    def program(s: Any) -> None:
        s += trellis.user("Who is Dobby?")
        s += trellis.assistant(trellis.gen("who", schema=Character, max_tokens=200))
        s += trellis.user("Three prime numbers?")
        s += trellis.assistant(trellis.gen("primes", schema=list[int], max_tokens=6))
        s += trellis.user("A sum?")
        s += trellis.assistant(
            trellis.gen("sum", grammar='start: N ("+" N)+ "=" N\nN: /[0-9]{1,2}/', max_tokens=30)
        )

    state = program.run(temperature=0, backend=engine)
    assert isinstance(state["who"], Character)
    assert state.meta("who").grammar_engine == "llguidance"
    assert re.fullmatch(r"\d{1,2}(\+\d{1,2})+=\d{1,2}|[\d+]*=?\d?", state["sum"])
    if state.meta("primes").finish_reason == "length":
        with pytest.raises(trellis.ProgramError, match="length"):
            state["primes"]
    else:
        assert all(isinstance(prime, int) for prime in state["primes"])


def test_a_schema_that_cannot_be_enforced_is_refused_with_its_place(engine: Any) -> None:
    @trellis.function
    def program(s: Any, strict: bool) -> None:
        items = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 3}
        s += "Numbers: " + trellis.gen(
            "x", schema={"properties": {"xs": items}, "required": ["xs"], "type": "object"}, strict=strict
        )

    with pytest.raises(trellis.ProgramError) as caught:
        program.run(True, backend=engine).sync()
    cause = caught.value.__cause__
    assert isinstance(cause, trellis.ConstraintError)
    assert (cause.kind, cause.code) == ("schema", "unsupported")
    assert "uniqueItems" in cause.detail
    assert "#/properties/xs" in cause.where
    state = program.run(False, temperature=0, max_new_tokens=60, backend=engine)
    assert isinstance(state["x"]["xs"], list)
    assert state.meta("x").validated_only == ("uniqueItems at #/properties/xs",)


@pytest.mark.server
def test_the_openai_client_gets_what_its_schema_says(server_url: str) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "c", "strict": True, "schema": json.loads(CHARACTER)},
    }
    messages: Any = [{"role": "user", "content": "Describe Dobby as JSON."}]
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="none") as client:
        create = client.chat.completions.create
        whole = create(model="default", messages=messages, response_format=form, temperature=0)
        text = whole.choices[0].message.content or ""
        assert Character.model_validate_json(text)
        parts = create(model="default", messages=messages, response_format=form, temperature=0, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == text
        parsed = client.chat.completions.parse(
            model="default", messages=messages, response_format=Wand, temperature=0
        )
        assert isinstance(parsed.choices[0].message.parsed, Wand)
        any_object = create(
            model="default",
            messages=messages,
            response_format={"type": "json_object"},
            max_tokens=40,
            seed=3,
        )
        if any_object.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(any_object.choices[0].message.content or ""), dict)
        bad: Any = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"$ref": "http://x.y/z"}}}
        with pytest.raises(openai.BadRequestError) as caught:
            create(model="default", messages=messages, response_format=bad)
    assert caught.value.param == "response_format"
    assert caught.value.code is not None
    assert caught.value.code.startswith("constraint_")


@pytest.mark.server
def test_the_native_route_reports_the_grammar(server_url: str) -> None:
    params = {"json_schema": {"enum": ["yes", "no"]}, "temperature": 0}
    answer = httpx.post(
        f"{server_url}/generate", json={"text": "Well? ", "sampling_params": params}, timeout=120
    )
    meta = answer.json()["meta_info"]
    assert json.loads(answer.json()["text"]) in ("yes", "no")
    assert (meta["grammar_engine"], meta["constraint_warnings"], meta["validated_only"]) == (
        "llguidance",
        [],
        [],
    )
    refused = httpx.post(
        f"{server_url}/generate",
        json={"text": "a", "sampling_params": {"json_schema": {"type": 5}}},
        timeout=120,
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["field"] == "json_schema"
