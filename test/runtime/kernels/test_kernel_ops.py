"""The decoder with Triton's operations between its products, against the same decoder with torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trellis.runtime.attention.base import AttentionShape
from trellis.runtime.attention.torch_reference import TorchAttention
from trellis.runtime.executor.batch import pack
from trellis.runtime.executor.contract import Extend
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.kernels.ops import TritonOps
from trellis.runtime.models import ModelConfig
from trellis.runtime.models.decoder import Decoder, DecoderWeights, LayerWeights
from trellis.runtime.models.ops import DecoderOps, TorchOps

COVERS = ("ops",)
VOCAB = 50


def make_config(qk_norm: bool) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=72,
        intermediate_size=100,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=20,
        context_length=64,
        norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        tied_head=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=qk_norm,
        sliding_windows=(None, 3),
    )


def make_weights(c: ModelConfig, device: torch.device) -> DecoderWeights:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(device)

    def weight(n: int) -> torch.Tensor:
        return (torch.rand(n, generator=generator) + 0.5).to(device)

    layers = tuple(
        LayerWeights(
            attention_norm=weight(c.hidden_size),
            qkv=matrix(c.query_size + 2 * c.kv_size, c.hidden_size),
            qkv_bias=None,
            query_norm=weight(c.head_dim) if c.qk_norm else None,
            key_norm=weight(c.head_dim) if c.qk_norm else None,
            output=matrix(c.hidden_size, c.query_size),
            output_bias=None,
            mlp_norm=weight(c.hidden_size),
            gate_up=matrix(2 * c.intermediate_size, c.hidden_size),
            gate_up_bias=None,
            down=matrix(c.hidden_size, c.intermediate_size),
            down_bias=None,
        )
        for _ in range(c.num_layers)
    )
    embedding = matrix(VOCAB, c.hidden_size) * 8
    return DecoderWeights(embedding, layers, weight(c.hidden_size), embedding)


def extend(tokens: range, start: int, slots: range) -> Extend:
    return Extend(np.array(tokens, np.int32), start, np.array(slots, np.int32), 0)


def logits_of(ops: DecoderOps, qk_norm: bool, device: torch.device) -> torch.Tensor:
    """A chunk beside a whole prompt, then a decode beside a chunk that continues."""
    config = make_config(qk_norm)
    decoder = Decoder(config, make_weights(config, device), ops)
    pool = KVPool(config, 40, torch.float32, str(device))
    attention = TorchAttention(AttentionShape.of(config), pool)
    steps = [
        [extend(range(5), 0, range(1, 6)), extend(range(10, 14), 0, range(20, 24))],
        [extend(range(7, 8), 5, range(1, 7)), extend(range(30, 33), 4, range(20, 27))],
    ]
    found = []
    for extends in steps:
        batch = pack(extends, device)
        attention.plan(batch)
        hidden = decoder.forward(batch.token_ids, batch.positions, attention)
        found.append(decoder.logits(hidden[batch.logits_rows]))
    return torch.cat(found)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_logits_are_those_of_torch(qk_norm, device):
    want = logits_of(TorchOps(), qk_norm, device)
    got = logits_of(TritonOps(), qk_norm, device)
    assert want.std() > 0.5
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
