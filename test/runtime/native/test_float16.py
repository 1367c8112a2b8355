"""The native step and attention in float16, whose numbers end at 65504 and thin out below 6e-5."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native_models import make_config, make_decoder

from trellis.runtime.attention.base import AttentionShape
from trellis.runtime.attention.native import NativeAttention
from trellis.runtime.attention.torch_reference import TorchAttention
from trellis.runtime.executor import ModelRunner
from trellis.runtime.executor.batch import pack
from trellis.runtime.executor.contract import Extend
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.executor.step import NativeStep, TorchStep
from trellis.runtime.models import Decoder
from trellis.runtime.native.decoder import NativeDecoder
from trellis.runtime.native.quantized import Quantization

SLOTS = 400


def extends_of(vocab: int) -> list[Extend]:
    """A prefill, a chunk and two decodes."""
    random, first, extends = np.random.default_rng(3), 1, []
    for start, new in ((0, 90), (60, 40), (70, 1), (20, 1)):
        slots = np.arange(first, first + start + new, dtype=np.int32)
        extends.append(Extend(random.integers(0, vocab, new).astype(np.int32), start, slots, new - 1))
        first += start + new
    return extends


def logits_of(step: NativeStep | TorchStep, vocab: int) -> torch.Tensor:
    rows = step.forward(extends_of(vocab))
    return rows.take(range(len(rows)))


def pool_of(model: Decoder) -> KVPool:
    pool = KVPool(model.config, SLOTS, model.dtype)
    generator = torch.Generator().manual_seed(5)
    for tensor in (*pool.keys, *pool.values):
        tensor[1:] = torch.randn(tensor[1:].shape, generator=generator).to(model.dtype)
    return pool


@torch.inference_mode()
@pytest.mark.parametrize("head_dim", [64, 24])
def test_steps_are_no_further_from_float32_than_the_torch_decoder(library, head_dim):
    config = make_config(head_dim=head_dim, hidden=128, intermediate=256, ratio=3)
    model, exact = make_decoder(config, torch.float16), make_decoder(config, torch.float32)
    want = logits_of(TorchStep(exact, pool_of(exact), "torch"), config.vocab_size)
    reference = logits_of(TorchStep(model, pool_of(model), "torch"), config.vocab_size)
    got = logits_of(NativeStep(NativeDecoder(library, model, 2), pool_of(model)), config.vocab_size)
    error = (got - want).square().mean().sqrt()
    assert 0 < error <= 1.1 * (reference - want).square().mean().sqrt()


@torch.inference_mode()
def test_integers_are_made_of_its_weights_too(library):
    config = make_config(hidden=64, intermediate=96)
    half, whole = make_decoder(config, torch.float16), make_decoder(config, torch.float32)
    got, want = (
        logits_of(
            NativeStep(NativeDecoder(library, m, 1, Quantization("int8")), pool_of(m)), config.vocab_size
        )
        for m in (half, whole)
    )
    assert torch.nn.functional.cosine_similarity(got, want).min() > 0.999


@pytest.mark.parametrize("new", [1, 40], ids=["few queries", "many"])
@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_small_and_large_values_are_read_as_they_are(library, size, new):
    """1e-6 has no leading 1 in float16; where such numbers are flushed to zero, all would be lost."""
    config = make_config(head_dim=64, windows=(None,))
    shape = AttentionShape.of(config)
    generator = torch.Generator().manual_seed(1)
    pool, exact = KVPool(config, 100, torch.float16), KVPool(config, 100, torch.float32)
    pool.keys[0][1:] = torch.randn(pool.keys[0][1:].shape, generator=generator)
    pool.values[0][1:] = torch.rand(pool.values[0][1:].shape, generator=generator) * size
    exact.keys[0][:], exact.values[0][:] = pool.keys[0], pool.values[0]
    batch = pack(
        [Extend(np.zeros(new, np.int32), 50, np.arange(1, 51 + new, dtype=np.int32), new)],
        torch.device("cpu"),
    )
    q = torch.randn(new, shape.num_heads, 64, generator=generator)
    native, reference = NativeAttention(shape, pool, library, 1), TorchAttention(shape, exact)
    native.plan(batch)
    reference.plan(batch)
    torch.testing.assert_close(native.read(q, 0), reference.read(q, 0), atol=1e-3 * size, rtol=1e-3)


def test_it_can_be_asked_for(tiny_model):
    model = make_decoder(tiny_model.config, torch.float16)
    runner = ModelRunner(model, 16, executor="native")
    assert isinstance(runner.step, NativeStep)
    assert runner.pool.keys[0].dtype == torch.float16
