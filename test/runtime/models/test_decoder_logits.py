"""Logits equal those of transformers, however a prompt reaches the model: whole, in chunks, cached in part, in a batch
with others, or reading slots that another request of the same batch writes."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from trellis.runtime.executor import ModelRunner
from trellis.runtime.executor.contract import Extend

TOLERANCE = 1e-4
VOCAB = 320


def ids(random: np.random.Generator, n: int) -> list[int]:
    return random.integers(0, VOCAB, n).tolist()


def slots_for(random: np.random.Generator, n: int, count: int = 512) -> np.ndarray:
    """Scattered slots, as a used pool hands them out."""
    return random.permutation(np.arange(1, count + 1, dtype=np.int32))[:n]


def extend(tokens: list[int], start: int, slots: np.ndarray, logits_from: int = 0) -> Extend:
    """The tokens of a sequence from ``start`` on; slots are those of the whole sequence."""
    new = np.array(tokens[start:], np.int32)
    return Extend(new, start, slots[: len(tokens)], logits_from)


def rows(runner: ModelRunner, extends: list[Extend]) -> torch.Tensor:
    logits = runner.forward(extends)
    return logits.take(range(len(logits)))


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    assert want.abs().max() > 1  # else the tolerance would say nothing
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_whole_prompts(tiny, random):
    runner = tiny.runner()
    for n in (1, 2, 8, 40, 130):
        tokens = ids(random, n)
        check(rows(runner, [extend(tokens, 0, slots_for(random, n))]), tiny.logits(tokens))


def test_prompts_in_random_chunks(tiny, random):
    runner = tiny.runner()
    for _ in range(4):
        tokens = ids(random, 60)
        slots = slots_for(random, 60)
        cuts = [0, *sorted(random.choice(np.arange(1, 60), 5, replace=False).tolist()), 60]
        parts = [
            rows(runner, [extend(tokens[:end], start, slots)]) for start, end in itertools.pairwise(cuts)
        ]
        check(torch.cat(parts), tiny.logits(tokens))


def test_token_by_token(tiny, random):
    runner = tiny.runner()
    tokens, slots = ids(random, 20), slots_for(random, 20)
    parts = [rows(runner, [extend(tokens[: i + 1], i, slots)]) for i in range(20)]
    check(torch.cat(parts), tiny.logits(tokens))


def test_second_request_reuses_slots_of_the_first(tiny, random):
    runner = tiny.runner()
    first, slots = ids(random, 50), slots_for(random, 90)
    rows(runner, [extend(first, 0, slots[:50])])
    second = first[:30] + ids(random, 20)
    reused = np.concatenate([slots[:30], slots[50:70]])
    check(rows(runner, [extend(second, 30, reused)]), tiny.logits(second)[30:])


def test_ragged_batch_of_prefills_chunks_and_decodes(tiny, random):
    runner = tiny.runner()
    lengths, starts = [5, 33, 1, 70, 12, 90], [0, 32, 0, 41, 11, 89]
    slots = np.split(slots_for(random, sum(lengths)), np.cumsum(lengths)[:-1])
    prompts = [ids(random, n) for n in lengths]
    for prompt, start, own in zip(prompts, starts, slots, strict=True):
        if start:
            runner.forward([extend(prompt[:start], 0, own, logits_from=start)])
    batch = [extend(p, start, own) for p, start, own in zip(prompts, starts, slots, strict=True)]
    want = torch.cat([tiny.logits(p)[start:] for p, start in zip(prompts, starts, strict=True)])
    check(rows(runner, batch), want)


def test_extends_of_one_batch_share_a_prefix(tiny, random):
    runner = tiny.runner()
    prefix, shared = ids(random, 40), slots_for(random, 80)
    owner = prefix + ids(random, 3)
    followers = [prefix[:n] + ids(random, more) for n, more in ((40, 1), (40, 6), (25, 4))]
    batch = [extend(owner, 0, shared[:43])]
    at = 43
    for follower, kept in zip(followers, (40, 40, 25), strict=True):
        own = shared[at : at + len(follower) - kept]
        batch.append(extend(follower, kept, np.concatenate([shared[:kept], own])))
        at += len(own)
    want = [tiny.logits(owner)]
    want += [tiny.logits(f)[kept:] for f, kept in zip(followers, (40, 40, 25), strict=True)]
    check(rows(runner, batch), torch.cat(want))
    # The order of the extends in the batch does not matter either.
    check(rows(runner, batch[::-1]), torch.cat(want[::-1]))


def test_only_rows_that_are_asked_for(tiny_llama, random):
    runner = tiny_llama.runner()
    tokens, slots = ids(random, 30), slots_for(random, 30)
    want = tiny_llama.logits(tokens)
    logits = runner.forward([extend(tokens, 0, slots, logits_from=27)])
    assert len(logits) == 3
    check(logits.take([0, 1, 2]), want[27:])
    assert len(runner.forward([extend(tokens, 0, slots, logits_from=30)])) == 0


def test_bfloat16_is_close(tiny_llama, random):
    from trellis.runtime.models import load_model

    tokens = ids(random, 40)
    runner = ModelRunner(load_model(tiny_llama.path, torch.bfloat16), 64)
    got = rows(runner, [extend(tokens, 0, slots_for(random, 40, 64))])
    want = tiny_llama.logits(tokens)
    assert got.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got, want).min() > 0.99
