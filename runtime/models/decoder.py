"""The decoder of the Llama family (Llama, SmolLM, Mistral, Qwen2, Qwen3).

One pass takes the new tokens of all requests of a batch, packed one after the other (T tokens in all), with no padding.
What tells requests apart is left to the attention backend. Heads: H for queries, G for keys and values, D wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from trellis.runtime.models.config import ModelConfig

if TYPE_CHECKING:
    from trellis.runtime.attention.base import AttentionBackend


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Products that read the same input are one matrix: qkv, gate and up."""

    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(H + 2G) * D, hidden]
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [D]
    key_norm: Tensor | None  # [D]
    output: Tensor  # [hidden, H * D]
    output_bias: Tensor | None
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


@dataclass(frozen=True)
class DecoderWeights:
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the embedding itself where the head is tied


class Decoder:
    """A config and its weights; stateless, so one instance serves any number of pools and threads."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._frequencies = rotary_frequencies(config).to(self.device)  # [D / 2]

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """token_ids, positions: int64 [T] → hidden states [T, hidden] before the final norm.

        ``attention`` has planned the batch already; it stores K and V and reads what each token may see.
        """
        rotary = self._rotary(positions)
        x = F.embedding(token_ids, self.weights.embedding)  # [T, hidden]
        for layer, w in enumerate(self.weights.layers):
            x = x + self._attention(self._norm(x, w.attention_norm), w, rotary, attention, layer)
            x = x + self._mlp(self._norm(x, w.mlp_norm), w)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden] rows of ``forward`` → float32 [R, vocab]."""
        return F.linear(self._norm(hidden, self.weights.norm), self.weights.head).float()

    def _attention(
        self,
        x: Tensor,
        w: LayerWeights,
        rotary: tuple[Tensor, Tensor],
        attention: AttentionBackend,
        layer: int,
    ) -> Tensor:
        c = self.config
        heads = F.linear(x, w.qkv, w.qkv_bias).view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        if w.query_norm is not None and w.key_norm is not None:
            q, k, v = heads.split_with_sizes((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
            qk = torch.cat((self._norm(q, w.query_norm), self._norm(k, w.key_norm)), dim=1)
        else:
            qk, v = heads.split_with_sizes((c.num_heads + c.num_kv_heads, c.num_kv_heads), dim=1)
        q, k = rotate(qk, rotary).split_with_sizes(
            (c.num_heads, c.num_kv_heads), dim=1
        )  # [T, H, D], [T, G, D]
        out = attention.run(q, k, v, layer)  # [T, H, D]
        return F.linear(out.reshape(-1, c.query_size), w.output, w.output_bias)

    def _mlp(self, x: Tensor, w: LayerWeights) -> Tensor:
        gate, up = F.linear(x, w.gate_up, w.gate_up_bias).chunk(2, dim=-1)  # [T, intermediate] each
        return F.linear(F.silu(gate) * up, w.down, w.down_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, signed sin), each [T, 1, D]; the first half of the sines is negated (see ``rotate``)."""
        angles = positions[:, None].float() * self._frequencies  # [T, D / 2]
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat((cos, cos), -1)[:, None].to(self.dtype),
            torch.cat((-sin, sin), -1)[:, None].to(self.dtype),
        )


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [T, heads, D]: (a, b) → (a cos - b sin, b cos + a sin), a and b the halves of each head.

    Rolling by half a head swaps a and b, so the sines that carry the signs do the rest.
    Source: Su et al. 2021, arXiv:2104.09864, in the layout of GPT-NeoX.
    """
    cos, signed_sin = rotary
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Radians a position for each pair of a head: float32 [D / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors)
    # llama3: waves that turn often within the original context stay, rare ones slow down, a ramp in between.
    turns = scaling.original_context * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return frequencies * (ramp + (1 - ramp) / scaling.factor)
