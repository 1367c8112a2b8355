"""The default model against transformers: logits, greedy text, perplexity."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from trellis.runtime.executor import ModelRunner, build_runner
from trellis.runtime.executor.contract import Extend, SampleRow
from trellis.runtime.messages import SamplingParams
from trellis.runtime.models import Tokenizer, load_tokenizer

pytestmark = pytest.mark.model

PROSE = (
    "The lighthouse had stood on the rocks for more than a hundred years, and in all that time it had never once "
    "failed to burn. Every evening the keeper climbed the narrow stairs, trimmed the wick, and wound the clockwork "
    "that turned the great lamp. From the gallery he could see the fishing boats coming home, one after another, "
    "their sails red in the last light. He knew each of them by name. When the fog came in from the sea, he rang "
    "the bell until his arms ached, and the sailors steered by the sound. On quiet nights he read, or mended his "
    "nets, or wrote long letters to his sister in the city, who had often asked him to come and live with her."
)
QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "How do plants make food?",
    "Give me three tips for sleeping well.",
    "Who wrote Romeo and Juliet?",
    "Explain what a prime number is.",
    "What is the difference between a frog and a toad?",
    "List the planets of the solar system.",
    "How do I boil an egg?",
    "Tell me a story about a brave mouse.",
    "What does a lawyer do?",
    "Why is the sky blue?",
    "Describe a good day in one paragraph.",
    "What is photosynthesis?",
    "How many legs does a spider have?",
    "Name some musical instruments.",
]
OPENINGS = [
    "Once upon a time there was a king who",
    "def fibonacci(n):\n",
    "The most important thing about bread is",
    PROSE[:300],
]
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return load_tokenizer(model_path)


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        model_path.parent, gguf_file=model_path.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def runner(model_path: Path) -> ModelRunner:
    return build_runner(model_path, "float32", num_slots=4096)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    chats = [tokenizer.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    return [tokenizer.encode(text) for text in chats + OPENINGS]


def extend(tokens: list[int], start: int, slots: np.ndarray, logits_from: int) -> Extend:
    return Extend(
        np.array(tokens, np.int32), start, slots[: start + len(tokens)].astype(np.int32), logits_from
    )


def greedy(runner: ModelRunner, prompts: list[list[int]], eos: frozenset[int]) -> list[list[int]]:
    """All prompts as one batch, then one token each a step, until EOS or the limit."""
    sizes = [len(prompt) + NEW_TOKENS for prompt in prompts]
    slots = np.split(np.arange(1, 1 + sum(sizes)), np.cumsum(sizes)[:-1])
    outputs: list[list[int]] = [[] for _ in prompts]
    running = list(range(len(prompts)))
    batch = [extend(p, 0, slots[i], len(p) - 1) for i, p in enumerate(prompts)]
    params = SamplingParams(temperature=0.0)
    for step in range(NEW_TOKENS):
        rows = [SampleRow(row, params, seed=0, step=step) for row in range(len(running))]
        for i, token in zip(running, runner.sample(runner.forward(batch), rows).token_ids, strict=True):
            outputs[i].append(token)
        running = [i for i in running if outputs[i][-1] not in eos]
        if not running:
            break
        batch = [extend(outputs[i][-1:], len(prompts[i]) + step, slots[i], 0) for i in running]
    return outputs


@torch.inference_mode()
def oracle_choices(oracle: transformers.PreTrainedModel, prompt: list[int], output: list[int]) -> list[int]:
    """What the oracle would choose after the prompt and after each output token. As long as its choices are the output
    itself, they are its own greedy text: each is made after the same tokens. One pass instead of one a token."""
    logits = oracle(torch.tensor([prompt + output[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_logits_equal_transformers(oracle, runner, tokenizer, prompts):
    """Whole, and in chunks of uneven size as one batch. In float64 there, since its own float32 is as far from that
    as 9e-5, depending on the number of threads."""
    chosen = [prompts[0], prompts[9], prompts[-3], tokenizer.encode(PROSE)]
    exact = copy.deepcopy(oracle).double()
    with torch.inference_mode():
        want = [exact(torch.tensor([ids])).logits[0].float() for ids in chosen]
    lengths = [len(ids) for ids in chosen]
    slots = np.split(np.arange(1, 1 + sum(lengths)), np.cumsum(lengths)[:-1])
    whole = runner.forward([extend(ids, 0, own, 0) for ids, own in zip(chosen, slots, strict=True)])
    torch.testing.assert_close(whole.take(range(len(whole))), torch.cat(want), atol=1e-4, rtol=0)

    cuts = [len(ids) // 3 for ids in chosen]
    runner.forward(
        [extend(ids[:cut], 0, own, cut) for ids, cut, own in zip(chosen, cuts, slots, strict=True)]
    )
    parts = zip(chosen, cuts, slots, strict=True)
    rest = runner.forward([extend(ids[cut:], cut, own, 0) for ids, cut, own in parts])
    tails = torch.cat([logits[cut:] for logits, cut in zip(want, cuts, strict=True)])
    torch.testing.assert_close(rest.take(range(len(rest))), tails, atol=1e-4, rtol=0)


def test_greedy_text_equals_transformers(oracle, runner, tokenizer, prompts):
    assert len(prompts) == 20
    outputs = greedy(runner, prompts, tokenizer.eos_token_ids)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NEW_TOKENS or output[-1] in tokenizer.eos_token_ids
        assert tokenizer.decode(output, False) == tokenizer.decode(
            oracle_choices(oracle, prompt, output), False
        )
    assert sum(map(len, outputs)) > 800


def test_greedy_text_equals_what_transformers_generates(oracle, runner, tokenizer, prompts):
    """The same by its own loop, with its own cache, for one prompt that goes on to the limit."""
    (output,) = greedy(runner, [prompts[1]], tokenizer.eos_token_ids)
    ids = torch.tensor([prompts[1]])
    (eos,) = tokenizer.eos_token_ids
    done = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    assert tokenizer.decode(output, False) == tokenizer.decode(done[0, len(prompts[1]) :].tolist(), False)


def test_perplexity_of_english_prose(runner, tokenizer):
    """Rotary halves in the wrong order give hundreds."""
    ids = tokenizer.encode(PROSE)
    logits = runner.forward([extend(ids, 0, np.arange(1, 1 + len(ids)), 0)])
    logprobs, _ = runner.score(logits, range(len(ids) - 1), ids[1:], 0)
    perplexity = float(np.exp(-np.mean(logprobs)))
    assert 5 < perplexity < 40


def test_bfloat16_answers_too(model_path, tokenizer):
    runner = build_runner(model_path, "bfloat16", num_slots=256)
    prompt = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": QUESTIONS[0]}]))
    (ids,) = greedy(runner, [prompt], tokenizer.eos_token_ids)
    assert "Paris" in tokenizer.decode(ids)
