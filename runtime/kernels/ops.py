"""The decoder's small operations by Triton kernels."""

from __future__ import annotations

from torch import Tensor

from trellis.runtime.attention.base import AttentionBackend
from trellis.runtime.kernels.activation import gate
from trellis.runtime.kernels.norms import add_norm, norm
from trellis.runtime.kernels.rotary import rotate_and_store
from trellis.runtime.models.rotary import Rotary


class TritonOps:
    """Implements ``trellis.runtime.models.ops.DecoderOps`` on CUDA tensors, and on a CPU's under Triton's interpreter.

    Stores keys and values itself, at ``attention.write_slots``: whatever the attention backend, if its pool is a ``KVPool``.
    """

    name = "triton"

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm(x, weight, eps)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_norm(x, delta, weight, eps)

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
        pool = attention.pool
        return rotate_and_store(
            heads,
            query_norm,
            key_norm,
            eps,
            rotary,
            attention.write_slots,
            pool.keys[layer],
            pool.values[layer],
        )

    def gate(self, gate_up: Tensor) -> Tensor:
        return gate(gate_up)
