"""What the runtime promises in counts: sharing, reuse, exact accounting, and clear refusals."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from trellis.runtime.manager.types import GenerateInput
from trellis.runtime.messages import SamplingParams

pytestmark = [pytest.mark.model]


def greedy(n: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=n, temperature=0.0, **more)


def random_prompt(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(n)]


async def generate_all(core: Any, prompts: list[list[int]], n: int) -> list[Any]:
    return await asyncio.gather(
        *(core.manager.generate(GenerateInput(prompt=p, params=greedy(n))) for p in prompts)
    )


@pytest.fixture
def core(engine: Any) -> Any:
    """The engine under the backend, with an empty cache."""
    engine.core.control("flush_cache")
    return engine.core


def test_a_new_prefix_that_many_requests_bring_is_computed_once(core: Any) -> None:
    rng = random.Random(1)
    prefix = random_prompt(rng, 1_000)
    suffixes = [random_prompt(rng, 20) for _ in range(12)]
    before = core.control("stats")
    asyncio.run(generate_all(core, [prefix + suffix for suffix in suffixes], 2))
    after = core.control("stats")
    computed = after["computed_prompt_tokens"] - before["computed_prompt_tokens"]
    assert computed <= len(prefix) + sum(map(len, suffixes))


def test_a_second_identical_request_computes_one_prompt_token(core: Any) -> None:
    prompt = random_prompt(random.Random(2), 333)
    first, second = (asyncio.run(generate_all(core, [prompt], 4))[0] for _ in range(2))
    assert first.counts.cached_tokens == 0
    assert second.counts.cached_tokens == len(prompt) - 1
    assert first.token_ids == second.token_ids


def test_accounting_is_exact_after_200_requests_with_aborts(core: Any) -> None:
    rng = random.Random(3)
    trunks = [random_prompt(rng, 60) for _ in range(6)]

    async def one(i: int) -> None:
        prompt = rng.choice(trunks)[: rng.randrange(1, 60)] + random_prompt(rng, rng.randrange(1, 20))
        task = asyncio.ensure_future(
            core.manager.generate(GenerateInput(prompt=prompt, params=greedy(rng.randrange(1, 12))))
        )
        if i % 3 == 0:
            await asyncio.sleep(rng.random() * 0.5)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def everything() -> None:
        await asyncio.gather(*(one(i) for i in range(200)))

    asyncio.run(everything())
    stats = core.control("stats")
    assert stats["running_requests"] == stats["waiting_requests"] == 0
    assert stats["aborted"] > 0
    assert stats["free_tokens"] + stats["evictable_tokens"] == stats["pool_tokens"]
    core.control("flush_cache")
    stats = core.control("stats")
    assert stats["free_tokens"] == stats["pool_tokens"]
    assert stats["drifts"] == 0


BAD_REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("empty prompt", {"text": ""}, "empty"),
    ("empty ids", {"input_ids": []}, "input_ids"),
    ("prompt over the context", {"input_ids": [1] * 9_000}, "8192"),
    ("token id out of range", {"input_ids": [999_999]}, "999999"),
    ("no prompt", {}, "text"),
    ("unknown field", {"text": "x", "max_tokens": 5}, "max_tokens"),
    ("unknown sampling field", {"text": "x", "sampling_params": {"temprature": 1}}, "temperature"),
    ("value of a wrong type", {"text": "x", "sampling_params": {"top_p": "high"}}, "top_p"),
    ("value out of range", {"text": "x", "sampling_params": {"top_p": 1.5}}, "top_p"),
    ("invalid regex", {"text": "x", "sampling_params": {"regex": "(a"}}, "regex"),
    ("back-reference", {"text": "x", "sampling_params": {"regex": r"(a)\1"}}, "regex"),
]


@pytest.mark.server
def test_bad_requests_are_refused_by_name_and_the_server_goes_on(server_url: str) -> None:
    for name, body, word in BAD_REQUESTS:
        answer = httpx.post(f"{server_url}/generate", json=body, timeout=60)
        assert answer.status_code == 400, (name, answer.text)
        assert word in answer.json()["error"]["message"], (name, answer.text)
    good = httpx.post(
        f"{server_url}/generate", json={"text": "Hello", "sampling_params": {"max_new_tokens": 2}}, timeout=60
    )
    assert good.status_code == 200
    assert good.json()["meta_info"]["completion_tokens"] >= 1


@pytest.mark.server
def test_concurrent_clients_all_get_answers(server_url: str) -> None:
    def ask(i: int) -> int:
        body = {"text": f"Count from {i}:", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        return httpx.post(f"{server_url}/generate", json=body, timeout=120).status_code

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(32))) == {200}
