"""Programs whose text ends inside a token, on the default model."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from trellis import function, gen
from trellis.frontend.backends.base import GenerateRequest, SamplingOptions
from trellis.runtime.manager import GenerateInput
from trellis.runtime.messages import SamplingParams

pytestmark = pytest.mark.model

GREEDY = {"temperature": 0, "max_tokens": 16}
SHORT = {"temperature": 0, "max_tokens": 8}
LINK = 'The link is <a href="http:'


@function
def continued(s: Any, text: str, more: str = " and", **options: Any) -> None:
    s += text
    s += gen("first", **options)
    s += more
    s += gen("second", max_tokens=2, min_tokens=0)


def test_a_url_goes_on_as_if_its_text_had_not_been_cut(engine: Any) -> None:
    whole = continued.run(text=LINK + "//", backend=engine, token_healing=False, **SHORT).text("first")
    healed = continued.run(text=LINK, backend=engine, **SHORT)
    plain = continued.run(text=LINK, backend=engine, token_healing=False, **SHORT)
    spelled = engine.core.tokenizer.token_bytes
    # "//" and one token less of the same text: the token that crosses the boundary is one of its own 8.
    assert ("//" + whole).startswith(healed.text("first"))
    assert len(healed.text("first")) > 16
    assert spelled[healed.meta("first").token_ids[0]] == b"://"
    assert spelled[plain.meta("first").token_ids[0]] != b"://"
    assert healed.text().startswith(LINK + "//")
    assert healed.meta("first").counts.prompt_tokens == plain.meta("first").counts.prompt_tokens - 1


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (LINK, {"regex": r"//[a-z]{1,9}\.(com|org)/"}),
        (LINK, {"choices": ["//www.example.com", "//localhost", "80"]}),
        ('The record: {"na', {"regex": r'me": "[A-Z][a-z]{1,8}", "age": \d\d\}'}),
        ("A list: ", {"schema": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}}),
        ("The best colour ", {"grammar": 'start: "is " WORD "."\nWORD: /[a-z]{1,8}/'}),
        ("He is independ", {}),
        ("Die Stra", {"regex": "ße nach (Köln|東京)"}),
        ("The capital of France is", {"stop": ["."]}),
        ("I like to eat ", {"min_tokens": 6, "repetition_penalty": 1.2}),
    ],
)
def test_a_healed_gen_has_the_same_state_and_the_next_prompt_finds_its_tokens_cached(
    engine: Any, text: str, options: dict[str, Any]
) -> None:
    state = continued.run(text=text, backend=engine, return_logprob=True, **options, **GREEDY)
    first, second = state.meta("first"), state.meta("second")
    assert state.text() == text + state.text("first") + " and" + state.text("second")
    assert len(first.logprobs) == len(first.token_ids) == first.counts.completion_tokens
    tokenizer = engine.core.tokenizer
    prompt = tokenizer.encode(text)
    spelled = b"".join(tokenizer.token_bytes[token] for token in first.token_ids).decode()
    overlap = text.encode()[
        len(b"".join(map(tokenizer.token_bytes.__getitem__, prompt[: first.counts.prompt_tokens]))) :
    ]
    assert (overlap.decode() + state.text("first")).startswith(
        spelled[: len(overlap.decode() + state.text("first"))]
    )
    # All but the last token, whose keys and values were never needed, and a token that a stop string was cut from.
    said = first.counts.prompt_tokens + first.counts.completion_tokens
    assert second.counts.cached_tokens >= said - 1 - bool(first.matched)
    if "regex" in options:
        plain = continued.run(text=text, backend=engine, token_healing=False, **options, **GREEDY)
        assert plain.meta("first").finish_reason == first.finish_reason == "stop"
    if "schema" in options:
        assert isinstance(json.loads(state.text("first")), list)


def test_a_forced_piece_has_the_tokens_of_the_whole_text(engine: Any) -> None:
    text, rest = 'The record: {"na', 'me": "Anna", "age": 31}'
    state = continued.run(text=text, backend=engine, choices=[rest], **GREEDY)
    tokenizer, meta = engine.core.tokenizer, state.meta("first")
    kept = tokenizer.encode(text)[: meta.counts.prompt_tokens]
    assert [*kept, *meta.token_ids] == tokenizer.encode(text + rest)
    assert meta.pieces == ((rest, "forced"),)
    assert meta.counts.sampled_tokens == 0


def test_where_no_longer_token_comes_the_answer_is_the_same_as_without(engine: Any) -> None:
    """Also with a seed: a token that comes again is as if it had never been taken back."""
    texts = ["The capital of France is", "One, two, three", "It was a dark"]
    calls = [{"text": text, "seed": seed} for text, seed in itertools.product(texts, range(2))]
    options = {"max_tokens": 4, "temperature": 0.8, "backend": engine}
    healed = [state.meta("first") for state in continued.run_batch(calls, **options)]
    plain = [state.meta("first") for state in continued.run_batch(calls, token_healing=False, **options)]
    same = [
        (a, b) for a, b in zip(healed, plain, strict=True) if a.counts.prompt_tokens == b.counts.prompt_tokens
    ]
    assert len(same) > 1
    for a, b in same:
        assert a.token_ids == b.token_ids
        assert a.counts.completion_tokens == b.counts.completion_tokens


def test_a_streamed_answer_does_not_repeat_the_prompt(engine: Any) -> None:
    whole = continued.run(text=LINK, backend=engine, **SHORT).text()
    state = continued.run(text=LINK, backend=engine, stream=True, **SHORT)
    assert "".join(state.text_iter()) == whole
    assert "".join(state.text_iter("first")) == state.text("first")


async def generate(engine: Any, prompt: Any, **options: Any) -> Any:
    params = SamplingParams(max_new_tokens=4, temperature=0.0)
    return await engine.core.manager.generate(GenerateInput(prompt=prompt, params=params, **options))


def test_the_api_heals_only_when_asked_and_never_ids(engine: Any) -> None:
    import asyncio

    ids = engine.core.tokenizer.encode(LINK)
    plain = asyncio.run(generate(engine, LINK))
    healed = asyncio.run(generate(engine, LINK, token_healing=True))
    of_ids = asyncio.run(generate(engine, ids, token_healing=True))
    scored = asyncio.run(generate(engine, LINK, token_healing=True, return_logprob=True, logprob_start=0))
    assert (plain.healed_characters, healed.healed_characters) == (0, 1)
    assert of_ids.token_ids == plain.token_ids == scored.token_ids
    assert len(scored.input_logprobs) == len(ids)
    assert healed.kept_tokens == 4


@pytest.mark.server
def test_a_server_heals_as_the_engine_does(engine: Any, server_url: str) -> None:
    import httpx

    from trellis import RuntimeEndpoint

    there = continued.run(text=LINK, backend=RuntimeEndpoint(server_url), **SHORT)
    here = continued.run(text=LINK, backend=engine, **SHORT)
    assert there.text() == here.text()
    body = {
        "model": "default",
        "prompt": LINK,
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": 1,
        "token_healing": True,
    }
    [choice] = httpx.post(f"{server_url}/v1/completions", json=body).json()["choices"]
    assert here.text("first").startswith(choice["text"])
    assert choice["logprobs"]["tokens"][0] == "://"
    assert choice["logprobs"]["text_offset"][:2] == [0, 2]
    chat = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "token_healing": True}
    refused = httpx.post(f"{server_url}/v1/chat/completions", json=chat)
    assert refused.status_code == 400
    assert "template" in refused.json()["error"]["message"]


def test_a_prompt_only_run_is_not_healed(engine: Any) -> None:
    import asyncio

    request = GenerateRequest((LINK,), SamplingOptions(max_new_tokens=0), token_healing=True)
    completion = asyncio.run(engine.generate(request))
    assert completion.counts.prompt_tokens == len(engine.core.tokenizer.encode(LINK))
