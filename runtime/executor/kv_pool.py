"""Where keys and values live: one pair of tensors a layer, one row a token."""

from __future__ import annotations

import torch
from torch import Tensor

from trellis.errors import CapacityError
from trellis.runtime.models.config import ModelConfig


class KVPool:
    """keys, values: one tensor a layer, [slots + 1, kv_heads, head_dim]. Slot 0 is the padding sink: it is never given
    to a token, so whatever is read or written there is harmless.

    Which slot belongs to whom is the scheduler's business (``trellis.radix.SlotPool``), not the pool's.
    """

    def __init__(self, config: ModelConfig, slots: int, dtype: torch.dtype, device: str = "cpu") -> None:
        shape = (slots + 1, config.num_kv_heads, config.head_dim)
        self.slots = slots
        try:
            # Zeros, not empty: padding is masked after the product, where a stray NaN would survive.
            pairs = [
                (
                    torch.zeros(shape, dtype=dtype, device=device),
                    torch.zeros(shape, dtype=dtype, device=device),
                )
                for _ in range(config.num_layers)
            ]
        except RuntimeError as error:
            needed = slots * kv_bytes_per_token(config, dtype)
            raise CapacityError(
                f"no memory for {slots} token slots ({needed / 2**30:.1f} GiB); ask for fewer", status=500
            ) from error
        self.keys: list[Tensor] = [key for key, _ in pairs]
        self.values: list[Tensor] = [value for _, value in pairs]

    def store(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [T, kv_heads, head_dim] to ``slots`` (int64 [T])."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values over all layers."""
    return 2 * config.num_layers * config.kv_size * dtype.itemsize
