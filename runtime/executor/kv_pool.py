"""Where keys and values live: one pair of tensors a layer, one row a token."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from trellis.errors import CapacityError
from trellis.runtime.models.config import ModelConfig

FP8 = torch.float8_e4m3fn
FP8_MOST = torch.finfo(FP8).max  # 448; a conversion of more would be NaN

CACHE_LINE = 64  # bytes; vector loads of a row then touch no more lines than they must


class KVPool:
    """keys, values: one tensor a layer, [slots + page_size, kv_heads, head_dim]. Slot 0 is the padding sink, and all of its
    page is its: never given to a token, so whatever is read or written there is harmless.

    slots: those that tokens can have, rounded down to whole pages. Which slot belongs to whom is the scheduler's business
    (``trellis.radix.SlotPool``, ``PagePool``), not the pool's.
    """

    def __init__(
        self, config: ModelConfig, slots: int, dtype: torch.dtype, device: str = "cpu", page_size: int = 1
    ) -> None:
        self.slots, self.page_size = slots - slots % page_size, page_size
        shape = (self.slots + page_size, config.num_kv_heads, config.head_dim)
        try:
            # Zeros, not empty: padding is masked after the product, where a stray NaN would survive.
            pairs = [
                (_zeros(shape, dtype, device), _zeros(shape, dtype, device)) for _ in range(config.num_layers)
            ]
        except (RuntimeError, MemoryError) as error:
            needed = slots * kv_bytes_per_token(config, dtype)
            raise CapacityError(
                f"no memory for {slots} token slots ({needed / 2**30:.1f} GiB); ask for fewer", status=500
            ) from error
        self.keys: list[Tensor] = [key for key, _ in pairs]
        self.values: list[Tensor] = [value for _, value in pairs]

    def store(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [T, kv_heads, head_dim] to ``slots`` (int64 [T])."""
        for pool, rows in ((self.keys[layer], keys), (self.values[layer], values)):
            if pool.dtype == FP8:  # has no indexing of its own
                rows = rows.float().clamp(-FP8_MOST, FP8_MOST).to(FP8).view(torch.uint8)
                pool.view(torch.uint8).index_copy_(0, slots, rows)
            else:
                pool.index_copy_(0, slots, rows.to(pool.dtype))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """On a CPU of memory that the system gives when it is first written (torch would write it all at once), so a pool
    costs what is used of it."""
    if device != "cpu":
        if dtype == FP8:
            return torch.zeros(shape, dtype=torch.uint8, device=device).view(FP8)
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size + CACHE_LINE, np.uint8))
    start = -raw.data_ptr() % CACHE_LINE
    return raw[start : start + size].view(dtype).view(shape)


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values over all layers."""
    return 2 * config.num_layers * config.kv_size * dtype.itemsize
