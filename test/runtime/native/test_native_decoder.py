"""The native decoder against the torch decoder, on random weights of every shape of model, layer by layer."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from native_models import as_float32, make_config, make_decoder

from trellis.runtime.executor import KVPool
from trellis.runtime.executor.batch import flatten
from trellis.runtime.executor.contract import Extend
from trellis.runtime.executor.step import NativeStep, TorchStep
from trellis.runtime.models import ModelConfig
from trellis.runtime.models.config import RopeScaling
from trellis.runtime.native import abi
from trellis.runtime.native.abi import Library
from trellis.runtime.native.decoder import NativeDecoder, PoolPointers, unsupported

SLOTS = 600
CPU = torch.device("cpu")


def configs() -> st.SearchStrategy[ModelConfig]:
    return st.builds(
        make_config,
        head_dim=st.sampled_from([8, 24, 64]),
        kv_heads=st.integers(1, 3),
        ratio=st.integers(1, 4),
        hidden=st.sampled_from([20, 64, 70]),
        intermediate=st.sampled_from([33, 96]),
        vocab=st.sampled_from([50, 320]),
        windows=st.sampled_from([(None, None, None), (5, None, 9)]),
        tied=st.booleans(),
        biases=st.booleans(),
        qk_norm=st.booleans(),
        rope=st.sampled_from(
            [None, RopeScaling("linear", 2.0), RopeScaling("yarn", 4.0, attention_factor=1.3)]
        ),
    )


def random_extends(c: ModelConfig, random: np.random.Generator) -> list[Extend]:
    """Chunks and decodes; the second half begins with slots of the first."""
    free = random.permutation(np.arange(1, SLOTS + 1, dtype=np.int32))
    extends: list[Extend] = []
    for i in range(int(random.integers(1, 6))):
        start, n = int(random.integers(0, 90)), int(random.choice([1, 1, 2, 9, 20]))
        slots, free = free[: start + n].copy(), free[start + n :]
        if i > 2:
            common = min(start, len(extends[0].slots))
            slots[:common] = extends[0].slots[:common]
        tokens = random.integers(0, c.vocab_size, n).astype(np.int32)
        extends.append(Extend(tokens, start, slots, int(random.integers(0, n + 1))))
    return extends


def filled_pool(c: ModelConfig, dtype: torch.dtype) -> KVPool:
    pool = KVPool(c, SLOTS, dtype)
    generator = torch.Generator().manual_seed(5)
    for tensor in (*pool.keys, *pool.values):
        tensor[1:] = torch.randn(tensor[1:].shape, generator=generator).to(dtype)
    return pool


def rows_of(logits: Any) -> torch.Tensor:
    return logits.take(range(len(logits)))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=configs(), threads=st.integers(1, 3), seed=st.integers(0, 2**31))
@torch.inference_mode()
def test_equals_the_torch_decoder_layer_by_layer(library, config, threads, seed):
    """What a layer writes to the pool shows all that came before it."""
    model = make_decoder(config, torch.float32, seed)
    ours, theirs = filled_pool(config, torch.float32), filled_pool(config, torch.float32)
    native = NativeStep(NativeDecoder(library, model, threads), ours)
    reference = TorchStep(model, theirs, "torch")
    random = np.random.default_rng(seed)
    for _ in range(2):  # the second finds buffers that are in use already
        extends = random_extends(config, random)
        got, want = native.forward(extends), reference.forward(extends)
        for layer in range(config.num_layers):
            torch.testing.assert_close(ours.keys[layer], theirs.keys[layer], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours.values[layer], theirs.values[layer], atol=1e-4, rtol=1e-4)
        assert len(got) == len(want) == sum(e.n_logits for e in extends)
        torch.testing.assert_close(rows_of(got), rows_of(want), atol=2e-4, rtol=1e-4)


@torch.inference_mode()
def test_bfloat16_is_no_further_from_float32_than_the_torch_decoder(library):
    config = make_config(head_dim=64, hidden=128, intermediate=256)
    model = make_decoder(config, torch.bfloat16)
    exact = as_float32(model)
    extends = random_extends(config, np.random.default_rng(11))
    results = []
    for decoder, native in ((exact, False), (model, False), (model, True)):
        pool = filled_pool(config, decoder.dtype)
        step = (
            NativeStep(NativeDecoder(library, decoder, 2), pool)
            if native
            else TorchStep(decoder, pool, "torch")
        )
        results.append(rows_of(step.forward(extends)))
    want, reference, got = results
    error = (got - want).square().mean().sqrt()
    assert error <= 1.1 * (reference - want).square().mean().sqrt()
    assert torch.nn.functional.cosine_similarity(got, want).min() > 0.999


def small(library: Library) -> tuple[NativeDecoder, KVPool]:
    config = make_config()
    return NativeDecoder(library, make_decoder(config, torch.float32), 2), filled_pool(config, torch.float32)


def one(tokens: list[int], slots: list[int], logits_from: int = 0) -> list[Extend]:
    return [Extend(np.array(tokens, np.int32), 0, np.array(slots, np.int32), logits_from)]


def test_hidden_rows_give_the_same_logits_later(library):
    decoder, pool = small(library)
    batch, pointers = flatten(one([1, 2, 3], [7, 8, 9])), PoolPointers(pool)
    now, hidden = torch.empty(3, 320), torch.empty(3, 64)
    decoder.step(batch, pointers, logits=now)
    decoder.step(batch, pointers, hidden=hidden)
    torch.testing.assert_close(decoder.logits(hidden), now, atol=1e-5, rtol=0)
    assert decoder.logits(hidden[:0]).shape == (0, 320)


def test_other_slots_stay_as_they_are(library):
    decoder, pool = small(library)
    before = [tensor.clone() for tensor in (*pool.keys, *pool.values)]
    decoder.step(flatten(one([1, 2], [7, 8], logits_from=2)), PoolPointers(pool))
    for old, new in zip(before, (*pool.keys, *pool.values), strict=True):
        changed = (old != new).flatten(1).any(1).nonzero().flatten()
        assert changed.tolist() == [7, 8]


@pytest.mark.parametrize(
    ("tokens", "slots", "message"),
    [
        ([320], [5], "token id 320 is not in the vocabulary of 320"),
        ([-1], [5], "token id -1 "),
        ([0], [SLOTS + 1], f"slot {SLOTS + 1} is not in the pool of {SLOTS} slots"),
        ([0], [-3], "slot -3 "),
    ],
)
def test_what_does_not_exist_is_refused(library, tokens, slots, message):
    decoder, pool = small(library)
    with pytest.raises(IndexError, match=message):
        decoder.step(flatten(one(tokens, slots)), PoolPointers(pool))


def test_time_is_told_apart_by_part(library):
    decoder, pool = small(library)
    seconds = np.zeros(len(abi.PARTS))
    decoder.step(
        flatten(one([1, 2], [7, 8])), PoolPointers(pool), logits=torch.empty(2, 320), seconds=seconds
    )
    assert (seconds > 0).all()


def test_padding_of_packed_weights_is_small(library):
    decoder, _ = small(library)
    c = decoder.config
    matrices = c.vocab_size * c.hidden_size + c.num_layers * (
        (c.query_size + 2 * c.kv_size) * c.hidden_size
        + c.hidden_size * c.query_size
        + 3 * c.intermediate_size * c.hidden_size
    )
    assert 4 * matrices <= decoder.nbytes <= 1.2 * 4 * matrices


def test_what_it_cannot_run_is_named():
    config = make_config()
    assert unsupported(config, torch.float32, CPU) is None
    assert unsupported(config, torch.bfloat16, CPU) is None
    assert unsupported(config, torch.float16, CPU) is None
    assert "float32, bfloat16, float16, not torch.float64" in str(unsupported(config, torch.float64, CPU))
    assert "cuda" in str(unsupported(config, torch.float32, torch.device("cuda")))
