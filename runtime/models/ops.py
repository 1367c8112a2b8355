"""What a decoder layer does between its products, so that kernels of a device can take the place of torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trellis.runtime.models.rotary import Rotary, rotate

if TYPE_CHECKING:
    from trellis.runtime.attention.base import AttentionBackend


class DecoderOps(Protocol):
    """x: [T, hidden] everywhere; D: width of a head; H, G: heads of queries, and of keys and values."""

    name: str

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) over the last dimension: x / sqrt(mean(x^2) + eps) * weight."""

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + delta, its ``norm``). May overwrite x."""

    def rotate_and_store(
        self,
        heads: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        eps: float,
        rotary: Rotary,
        attention: AttentionBackend,
        layer: int,
    ) -> Tensor:
        """Norms, if there are any, and rotary embedding of queries and keys; keys and values go to the pool, where the
        attention's plan says. heads: [T, H + 2G, D], queries, then keys, then values → queries [T, H, D]."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """[T, 2I] → [T, I]: silu of the first half, times the second."""


class TorchOps:
    """The reference, on any device."""

    name = "torch"

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x + delta
        return x, self.norm(x, weight, eps)

    def rotate_and_store(
        self,
        heads: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        eps: float,
        rotary: Rotary,
        attention: AttentionBackend,
        layer: int,
    ) -> Tensor:
        kv_heads = attention.shape.num_kv_heads
        queries = heads.shape[1] - 2 * kv_heads
        qk, v = heads.split_with_sizes((queries + kv_heads, kv_heads), dim=1)
        if query_norm is not None and key_norm is not None:
            q, k = qk.split_with_sizes((queries, kv_heads), dim=1)
            qk = torch.cat((self.norm(q, query_norm, eps), self.norm(k, key_norm, eps)), dim=1)
        q, k = rotate(qk, rotary).split_with_sizes((queries, kv_heads), dim=1)
        attention.store(k, v, layer)
        return q

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
