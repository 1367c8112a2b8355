"""The server on the default model: what clients get is what the model says."""

from __future__ import annotations

import asyncio
import re

import httpx
import openai
import pytest

pytestmark = [pytest.mark.server, pytest.mark.model]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_greedy_chat_is_the_same_streamed_repeated_and_in_company(server_url: str) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none") as client:

            async def ask(content: str) -> str:
                answer = await client.chat.completions.create(
                    model="default",
                    messages=[{"role": "user", "content": content}],
                    temperature=0,
                    max_tokens=16,
                )
                return answer.choices[0].message.content or ""

            async def streamed() -> str:
                parts = await client.chat.completions.create(
                    model="default",
                    messages=QUESTION,  # type: ignore[arg-type]
                    temperature=0,
                    max_tokens=16,
                    stream=True,
                )
                return "".join([part.choices[0].delta.content or "" async for part in parts])

            alone = await ask(QUESTION[0]["content"])
            company = await asyncio.gather(
                streamed(), ask(QUESTION[0]["content"]), ask("Say hello."), ask("Name a colour.")
            )
            return [alone, *company[:2]]

    texts = asyncio.run(run())
    assert "Paris" in texts[0]
    assert len(set(texts)) == 1


def test_a_repeated_prompt_is_cached_but_for_its_last_token(server_url: str) -> None:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="none") as client:
        for _ in range(2):
            answer = client.chat.completions.create(
                model="default",
                messages=QUESTION,  # type: ignore[arg-type]
                max_tokens=1,
            )
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_constrained_text_matches_and_says_what_was_forced(server_url: str) -> None:
    body = {"text": "The date is ", "sampling_params": {"regex": r"\d{4}-\d{2}-\d{2}T00:00:00Z", "seed": 1}}
    answer = httpx.post(f"{server_url}/generate", json=body, timeout=120).json()
    assert re.fullmatch(body["sampling_params"]["regex"], answer["text"])  # type: ignore[index]
    meta = answer["meta_info"]
    assert (
        meta["completion_tokens"]
        == meta["sampled_tokens"] + meta["forced_tokens"]
        == len(answer["output_ids"])
    )
    assert meta["forced_tokens"] > 0
    assert meta["forward_passes"] < meta["completion_tokens"]
    forced = [answer["text"][start:end] for start, end in meta["forced_spans"]]
    assert forced[-1].endswith("T00:00:00Z")
    assert not any(re.search("[1-9]", part) for part in forced)  # the digits of the date are the model's


def test_the_stop_string_is_cut_and_the_tokens_before_it_are_kept(server_url: str) -> None:
    params = {"temperature": 0, "max_new_tokens": 40, "stop": ["7"]}
    body = {"text": "1 2 3 4 5 6 7 8 9 10 11 12\n1 2 3 4", "sampling_params": params}
    answer = httpx.post(f"{server_url}/generate", json=body, timeout=120).json()
    assert answer["text"] == " 5 6 "
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "7"}
    kept = answer["output_ids"][: answer["meta_info"]["kept_tokens"]]
    more = {"segments": [body["text"], kept, "9"], "sampling_params": {"max_new_tokens": 1}}
    again = httpx.post(f"{server_url}/generate", json=more, timeout=120).json()["meta_info"]
    # Everything but the last token of the old text and what is new comes from the cache.
    assert again["cached_tokens"] >= answer["meta_info"]["prompt_tokens"] + len(kept) - 1


def test_scores_prefer_what_is_true(server_url: str) -> None:
    body = {"text": "The capital of France is", "options": [" Paris", " London", " Berlin"]}
    answer = httpx.post(f"{server_url}/score", json=body, timeout=120).json()
    totals = [sum(option["logprobs"]) for option in answer["options"]]
    assert totals.index(max(totals)) == 0


def test_health_answers_under_load(server_url: str) -> None:
    async def run() -> list[int]:
        async with httpx.AsyncClient(timeout=120) as client:
            body = {"text": ["Once upon a time"] * 8, "sampling_params": {"max_new_tokens": 24}}
            work = asyncio.ensure_future(client.post(f"{server_url}/generate", json=body))
            statuses = []
            while not work.done():
                statuses.append((await client.get(f"{server_url}/health")).status_code)
                await asyncio.sleep(0.02)
            assert (await work).status_code == 200
            return statuses

    statuses = asyncio.run(run())
    assert len(statuses) > 1
    assert set(statuses) == {200}
