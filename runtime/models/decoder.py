"""The decoder of the Llama family (Llama, SmolLM, Mistral, Qwen2, Qwen3).

One pass takes the new tokens of all requests of a batch, packed one after the other (T tokens in all), with no padding.
What tells requests apart is left to the attention backend. Heads: H for queries, G for keys and values, D wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from trellis.runtime.models.config import ModelConfig
from trellis.runtime.models.ops import DecoderOps, TorchOps
from trellis.runtime.models.rotary import Rotary, rotary_frequencies, rotary_of, rotary_scale

if TYPE_CHECKING:
    from trellis.runtime.attention.base import AttentionBackend
    from trellis.runtime.distributed.contract import Ranks


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
    """A config and its weights; stateless, so one instance serves any number of pools and threads.

    ops: what is done between the products; see ``DecoderOps``. ranks: a group that computes the model together. config and
    weights are then this rank's part (see ``runtime/distributed/split.py``), H, G and the products' inner sizes its own; the
    vocabulary is that of the whole, of which the embedding and the head have their part of the rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        ops: DecoderOps | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops or TorchOps()
        self.ranks = ranks
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._frequencies = rotary_frequencies(config).to(self.device)  # [D / 2]
        self._rotary_scale = rotary_scale(config)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """token_ids, positions: int64 [T] → hidden states [T, hidden] before the final norm.

        ``attention`` has planned the batch already; it stores K and V and reads what each token may see.
        """
        ops, eps = self.ops, self.config.norm_eps
        rotary = rotary_of(positions, self._frequencies, self.dtype, self._rotary_scale)
        x = self._embed(token_ids)  # [T, hidden]
        normed = ops.norm(x, self.weights.layers[0].attention_norm, eps)
        for layer, w in enumerate(self.weights.layers):
            attended = self._attention(normed, w, rotary, attention, layer)
            x, normed = ops.add_norm(x, attended, w.mlp_norm, eps)
            mlp = self._mlp(normed, w)
            if layer + 1 == len(self.weights.layers):
                return x + mlp
            x, normed = ops.add_norm(x, mlp, self.weights.layers[layer + 1].attention_norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden] rows of ``forward`` → float32 [R, vocab], whole on rank 0 of a group."""
        normed = self.ops.norm(hidden, self.weights.norm, self.config.norm_eps)
        logits = F.linear(normed, self.weights.head)
        if self.ranks is not None:
            logits = self.ranks.join(logits)[:, : self.config.vocab_size].contiguous()
        return logits.float()

    def _embed(self, token_ids: Tensor) -> Tensor:
        table = self.weights.embedding
        if self.ranks is None:
            return F.embedding(token_ids, table)
        rows = token_ids - self.ranks.rank * len(table)
        elsewhere = (rows < 0) | (rows >= len(table))
        found = F.embedding(rows.masked_fill(elsewhere, 0), table)
        return self.ranks.sum(found.masked_fill(elsewhere[:, None], 0))

    def _summed(self, partial: Tensor) -> Tensor:
        return partial if self.ranks is None else self.ranks.sum(partial)

    def _attention(
        self, x: Tensor, w: LayerWeights, rotary: Rotary, attention: AttentionBackend, layer: int
    ) -> Tensor:
        c = self.config
        heads = F.linear(x, w.qkv, w.qkv_bias).view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q = self.ops.rotate_and_store(heads, w.query_norm, w.key_norm, c.norm_eps, rotary, attention, layer)
        out = attention.read(q, layer)  # [T, H, D]
        return self._summed(F.linear(out.reshape(-1, c.query_size), w.output, w.output_bias))

    def _mlp(self, x: Tensor, w: LayerWeights) -> Tensor:
        inner = self.ops.gate(F.linear(x, w.gate_up, w.gate_up_bias))
        return self._summed(F.linear(inner, w.down, w.down_bias))
