"""Decoders with random weights, made on the device: the shape is what counts for speed, and equality needs no sense."""

from __future__ import annotations

import torch
from torch import Tensor

from trellis.runtime.models.config import ModelConfig
from trellis.runtime.models.decoder import Decoder, DecoderWeights, LayerWeights


def shaped(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, context: int
) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        context_length=context,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=None,
        tied_head=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(None,) * layers,
    )


def llama_3_8b() -> ModelConfig:
    """The published shape of Meta's Llama 3 8B (arXiv:2407.21783), with a context of 8,192."""
    return shaped(128256, 4096, 14336, 32, 32, 8, 8192)


def medium() -> ModelConfig:
    """Small enough for float32, with enough layers for errors to show."""
    return shaped(4096, 1024, 2816, 8, 16, 4, 4096)


def tiny() -> ModelConfig:
    """For a run without a GPU."""
    return shaped(1024, 64, 96, 2, 4, 2, 2048)


def random_decoder(c: ModelConfig, dtype: torch.dtype, where: torch.device, seed: int = 0) -> Decoder:
    generator = torch.Generator(where).manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        values = torch.empty(rows, columns, dtype=dtype, device=where)
        return values.normal_(0.0, columns**-0.5, generator=generator)

    def ones() -> Tensor:
        return torch.ones(c.hidden_size, dtype=dtype, device=where)

    layers = tuple(
        LayerWeights(
            attention_norm=ones(),
            qkv=matrix(c.query_size + 2 * c.kv_size, c.hidden_size),
            qkv_bias=None,
            query_norm=None,
            key_norm=None,
            output=matrix(c.hidden_size, c.query_size),
            output_bias=None,
            mlp_norm=ones(),
            gate_up=matrix(2 * c.intermediate_size, c.hidden_size),
            gate_up_bias=None,
            down=matrix(c.hidden_size, c.intermediate_size),
            down_bias=None,
        )
        for _ in range(c.num_layers)
    )
    embedding = matrix(c.vocab_size, c.hidden_size).mul_(c.hidden_size**0.5)
    return Decoder(c, DecoderWeights(embedding, layers, ones(), matrix(c.vocab_size, c.hidden_size)))


def product_weights(c: ModelConfig) -> int:
    """Numbers that every decode step reads: all matrices but the embedding, of which it reads a few rows."""
    layer = c.hidden_size * (2 * c.query_size + 2 * c.kv_size + 3 * c.intermediate_size)
    return c.num_layers * layer + c.vocab_size * c.hidden_size
