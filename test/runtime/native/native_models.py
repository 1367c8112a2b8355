"""Random decoders of any shape."""

from __future__ import annotations

from typing import Any

import torch

from trellis.runtime.models import ModelConfig
from trellis.runtime.models.config import RopeScaling
from trellis.runtime.models.decoder import Decoder, DecoderWeights, LayerWeights


def make_config(
    head_dim: int = 24,
    kv_heads: int = 2,
    ratio: int = 2,
    hidden: int = 64,
    intermediate: int = 96,
    vocab: int = 320,
    windows: tuple[int | None, ...] = (None, None, None),
    tied: bool = True,
    biases: bool = False,
    qk_norm: bool = False,
    rope: RopeScaling | None = None,
) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=len(windows),
        num_heads=kv_heads * ratio,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=512,
        norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=rope,
        tied_head=tied,
        qkv_bias=biases,
        output_bias=biases,
        mlp_bias=biases,
        qk_norm=qk_norm,
        sliding_windows=windows,
    )


def make_decoder(c: ModelConfig, dtype: torch.dtype, seed: int = 0) -> Decoder:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(dtype)

    def norm(n: int) -> torch.Tensor:
        return (torch.rand(n, generator=generator) + 0.5).to(dtype)

    def bias(n: int, there: bool) -> torch.Tensor | None:
        return torch.randn(n, generator=generator).to(dtype) if there else None

    qkv = c.query_size + 2 * c.kv_size
    layers = tuple(
        LayerWeights(
            attention_norm=norm(c.hidden_size),
            qkv=matrix(qkv, c.hidden_size),
            qkv_bias=bias(qkv, c.qkv_bias),
            query_norm=norm(c.head_dim) if c.qk_norm else None,
            key_norm=norm(c.head_dim) if c.qk_norm else None,
            output=matrix(c.hidden_size, c.query_size),
            output_bias=bias(c.hidden_size, c.output_bias),
            mlp_norm=norm(c.hidden_size),
            gate_up=matrix(2 * c.intermediate_size, c.hidden_size),
            gate_up_bias=bias(2 * c.intermediate_size, c.mlp_bias),
            down=matrix(c.hidden_size, c.intermediate_size),
            down_bias=bias(c.hidden_size, c.mlp_bias),
        )
        for _ in range(c.num_layers)
    )
    embedding = matrix(c.vocab_size, c.hidden_size) * c.hidden_size**0.5
    head = embedding if c.tied_head else matrix(c.vocab_size, c.hidden_size)
    return Decoder(c, DecoderWeights(embedding, layers, norm(c.hidden_size), head))


def as_float32(model: Decoder) -> Decoder:
    """The same weights, in float32."""

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) else value

    weights = model.weights
    layers = tuple(LayerWeights(**{k: wide(v) for k, v in vars(layer).items()}) for layer in weights.layers)
    embedding = weights.embedding.float()
    head = embedding if weights.head is weights.embedding else weights.head.float()
    return Decoder(model.config, DecoderWeights(embedding, layers, weights.norm.float(), head))
