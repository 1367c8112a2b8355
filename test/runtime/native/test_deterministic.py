"""Deterministic steps: a position's logits are the same bits in any batch, chunking, and with any cached prefix."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from native_models import make_config, make_decoder

from trellis.errors import InvalidRequestError, ModelLoadError
from trellis.runtime.config import ServerConfig
from trellis.runtime.executor import ModelRunner
from trellis.runtime.executor.contract import Extend
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.executor.step import NativeStep
from trellis.runtime.models import Decoder
from trellis.runtime.native.abi import Library
from trellis.runtime.native.decoder import NativeDecoder
from trellis.runtime.native.quantized import Quantization

SLOTS = 4000
LENGTHS = (700, 690, 420, 150, 3)
SHARED = 300  # tokens that all begin with, as far as they go
LARGEST = 200

Ids = npt.NDArray[np.int32]

MODELS = {
    "plain": {"head_dim": 64},
    "windows": {"head_dim": 24, "windows": (70, None, 9), "qk_norm": True, "ratio": 3},
}


def make_step(library: Library, model: Decoder, deterministic: bool, kept: str = "none") -> NativeStep:
    decoder = NativeDecoder(library, model, 2, Quantization(kept), deterministic)
    return NativeStep(decoder, KVPool(model.config, SLOTS, model.dtype))


def sequences(vocab: int, random: np.random.Generator) -> list[Ids]:
    prefix = random.integers(0, vocab, SHARED)
    return [
        np.concatenate((prefix, random.integers(0, vocab, max(LENGTHS))))[:n].astype(np.int32)
        for n in LENGTHS
    ]


def alone(step: NativeStep, ids: Ids) -> torch.Tensor:
    """The logits of all positions, in one extend."""
    slots = np.arange(1, len(ids) + 1, dtype=np.int32)
    return step.forward([Extend(ids, 0, slots, 0)]).take(range(len(ids)))


def together(step: NativeStep, all_ids: list[Ids], random: np.random.Generator) -> list[torch.Tensor]:
    """The same of all sequences: in chunks of random sizes, down to single tokens, in batches of random company. The
    first computes the shared prefix, the others find it in the cache."""
    free = random.permutation(np.arange(1, SLOTS + 1, dtype=np.int32))
    slots: list[Ids] = []
    for ids in all_ids:
        own, free = free[: len(ids)].copy(), free[len(ids) :]
        cached = min(SHARED, len(ids) - 1) if slots else 0
        own[:cached] = slots[0][:cached] if slots else own[:0]
        slots.append(own)
    done = [0] + [min(SHARED, len(ids) - 1) for ids in all_ids[1:]]
    parts: list[list[torch.Tensor]] = [[] for _ in all_ids]
    while any(at < len(ids) for at, ids in zip(done, all_ids, strict=True)):
        waiting = done[0] < SHARED  # for the prefix
        chosen = [
            i
            for i, ids in enumerate(all_ids)
            if done[i] < len(ids) and (i == 0 or not waiting) and random.random() < 0.7
        ]
        sizes = [min(len(all_ids[i]) - done[i], int(random.choice([1, 1, 2, 30, LARGEST]))) for i in chosen]
        batch = [
            Extend(all_ids[i][done[i] : done[i] + n], done[i], slots[i][: done[i] + n], 0)
            for i, n in zip(chosen, sizes, strict=True)
        ]
        if not batch:
            continue
        logits = step.forward(batch)
        rows = torch.split(logits.take(range(len(logits))), sizes)
        for i, n, row in zip(chosen, sizes, rows, strict=True):
            parts[i].append(row)
            done[i] += n
    return [torch.cat(part) for part in parts]


def unequal(library: Library, model: Decoder, deterministic: bool, seed: int, kept: str = "none") -> int:
    """How many of the sequences have any bit of difference."""
    step, random = make_step(library, model, deterministic, kept), np.random.default_rng(seed)
    all_ids = sequences(model.config.vocab_size, random)
    want = [alone(step, ids) for ids in all_ids]
    got = together(step, all_ids, random)
    return sum(not torch.equal(a[-len(b) :], b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", MODELS)
def test_logits_are_the_same_bits_in_any_company(library, shape, dtype):
    model = make_decoder(make_config(**MODELS[shape]), dtype)
    for seed in range(2):
        assert unequal(library, model, True, seed) == 0


@pytest.mark.parametrize("kept", ["int8", "int4"])
def test_quantised_weights_too(library, kept):
    model = make_decoder(make_config(**MODELS["plain"]), torch.bfloat16)
    assert unequal(library, model, True, 0, kept) == 0


def test_without_it_company_shows_in_the_last_bits(library):
    """So the test above can see a difference."""
    model = make_decoder(make_config(**MODELS["plain"]), torch.float32)
    assert unequal(library, model, False, 0) > 0


def test_it_is_refused_where_it_does_not_hold(tiny_model):
    with pytest.raises(ModelLoadError, match="deterministic steps are for the native executor"):
        ModelRunner(tiny_model, 16, executor="torch", deterministic=True)
    with pytest.raises(InvalidRequestError, match="deterministic"):
        ServerConfig("smollm2-135m", deterministic=True, executor="torch")
    with pytest.raises(InvalidRequestError, match="deterministic"):
        ServerConfig("smollm2-135m", deterministic=True, attention_backend="torch")
