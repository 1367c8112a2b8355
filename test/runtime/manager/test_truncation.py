"""Where a prompt that is too long is cut."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_fakes import CONTEXT, ByteTokenizer, EchoScheduler, echo_build

from trellis.errors import InvalidRequestError
from trellis.runtime.config import ServerConfig
from trellis.runtime.engine import InProcessEngine
from trellis.runtime.manager.prompts import PromptEncoder
from trellis.runtime.manager.truncation import ANSWER_SHARE, STEPS, prompt_limit, shortened
from trellis.runtime.manager.types import GenerateInput
from trellis.runtime.messages import SamplingParams


@given(length=st.integers(0, 300), limit=st.integers(-5, 300), bos=st.integers(0, 2), begins=st.booleans())
def test_what_is_kept_is_bos_and_the_end(length, limit, bos, begins):
    first = [1000 + i for i in range(bos)]
    ids = [*first, *range(length)] if begins else list(range(length))
    kept = first if begins else []
    got = shortened(ids, limit, first)
    if len(ids) <= limit or limit <= len(kept):
        assert got == ids
        return
    assert got[: len(kept)] == kept
    assert got[len(kept) :] == ids[len(ids) - (len(got) - len(kept)) :]
    assert limit - max(1, (limit - len(kept)) // STEPS) < len(got) <= limit


def test_a_growing_conversation_is_cut_at_the_same_place_for_some_turns():
    """So that what its turns have in common is found in the cache: each place but the first serves a sixteenth."""
    starts = [shortened(list(range(n)), 160, [])[0] for n in range(161, 400)]
    assert sorted(starts) == starts
    assert len(set(starts)) == -(-len(starts) // (160 // STEPS))


@pytest.mark.parametrize(
    ("new_tokens", "strict", "limit"),
    [
        (30, False, 170),
        (30, True, 170),
        (190, True, 10),
        (190, False, 200 - 200 // ANSWER_SHARE),
        (0, False, 199),
        (200, True, 0),
    ],
)
def test_room_for_the_answer(new_tokens, strict, limit):
    assert prompt_limit(200, new_tokens, strict) == limit


@pytest.fixture
def scheduler() -> EchoScheduler:
    return EchoScheduler()


@pytest.fixture
def engine(scheduler: EchoScheduler) -> Iterator[InProcessEngine]:
    config = ServerConfig("echo", max_running_requests=8, max_queued_requests=8, allow_auto_truncate=True)
    with InProcessEngine(config, echo_build(scheduler)) as engine:
        yield engine


def generate(engine: InProcessEngine, prompt: Any, n: int = 4, **more: Any) -> Any:
    params = SamplingParams(max_new_tokens=n)
    return asyncio.run(engine.manager.generate(GenerateInput(prompt=prompt, params=params, **more)))


@pytest.mark.parametrize("length", [CONTEXT - 3, CONTEXT, 1000])
@pytest.mark.parametrize("as_ids", [True, False])
def test_the_end_is_generated_from_and_the_result_says_so(engine, scheduler, length, as_ids):
    ids = [97 + i % 26 for i in range(length)]
    result = generate(engine, ids if as_ids else bytes(ids).decode())
    [command] = scheduler.commands
    assert command.token_ids == ids[-len(command.token_ids) :]
    assert len(command.token_ids) + 4 <= CONTEXT
    assert result.counts.prompt_tokens == len(command.token_ids) == length - result.truncated_tokens
    assert result.warnings == [
        f"the prompt was too long: {result.truncated_tokens} tokens at its beginning were cut"
    ]


def test_a_prompt_that_fits_is_left_alone(engine, scheduler):
    ids = [97] * (CONTEXT - 4)
    result = generate(engine, ids)
    assert scheduler.commands[0].token_ids == ids
    assert (result.truncated_tokens, result.warnings) == (0, [])


def test_new_tokens_that_are_only_a_bound_get_a_share(engine, scheduler):
    """But a prompt that fits beside that share keeps all it has."""
    generate(engine, [97] * 150, n=1000)
    assert len(scheduler.commands[0].token_ids) == 150
    generate(engine, [97] * 199, until_context=True)
    assert len(scheduler.commands[1].token_ids) <= CONTEXT - CONTEXT // ANSWER_SHARE


def test_strict_lengths_are_made_room_for_or_refused(engine, scheduler):
    result = generate(engine, [97] * 150, n=100, strict_length=True)
    assert result.counts.completion_tokens == 100
    assert len(scheduler.commands[0].token_ids) <= 100
    with pytest.raises(
        InvalidRequestError, match=f"at most 50 more fit into the context length of {CONTEXT}"
    ):
        generate(engine, [97] * 150, n=CONTEXT, strict_length=True)


def test_a_stream_says_so_too(engine):
    async def run() -> list[Any]:
        item = GenerateInput(prompt=[97] * 300, params=SamplingParams(max_new_tokens=3))
        return [delta async for delta in engine.manager.stream(item)]

    deltas = asyncio.run(run())
    assert {delta.truncated_tokens for delta in deltas} == {deltas[0].truncated_tokens}
    assert deltas[0].truncated_tokens >= 300 - CONTEXT


def test_a_prompt_whose_own_logprobs_are_wanted_is_refused(engine):
    with pytest.raises(InvalidRequestError, match=f"has 300 tokens; the context length is {CONTEXT}"):
        generate(engine, [97] * 300, logprob_start=0)
    with pytest.raises(InvalidRequestError, match=f"has 300 tokens; the context length is {CONTEXT}"):
        asyncio.run(engine.manager.score([97] * 300, ["a", "b"]))


def test_what_is_far_too_long_is_refused_untokenized():
    encoder = PromptEncoder(ByteTokenizer(), 10, contexts=3)
    with pytest.raises(InvalidRequestError, match="has 31 tokens; 3 times the context length is 30"):
        encoder.segments([97] * 31, "prompt")
    with pytest.raises(
        InvalidRequestError, match="more than 30 tokens, 3 times the context length, can spell"
    ):
        encoder.segments("a" * 1000, "prompt")


def test_the_log_says_it_once(engine, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            generate(engine, [97] * 300)
    assert caplog.text.count("--allow-auto-truncate: a prompt lost its first") == 1
