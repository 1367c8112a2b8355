"""How large the tiles of ``paged_attention.py`` are, for each head size and type."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trellis.runtime.kernels.launch import power_of_two

# Compute capabilities with which whole tiles of keys are multiplied out of shared memory: of the chips for data centres. With
# 12.0 (GeForce RTX 50) factors go through registers again, and twice the keys would not fit in those.
OUT_OF_SHARED_MEMORY = ((9, 0), (12, 0))


@dataclass(frozen=True)
class TileShape:
    """height: rows of queries. keys: how many are taken at a time. whole: see ``attend_tiles``. warps, stages: of Triton's
    compiler; with 5 stages two blocks of keys and values are under way, since each waits for its slots."""

    height: int
    keys: int
    whole: bool
    warps: int
    stages: int


def block_dim(head_dim: int) -> int:
    """Columns of a tile; those past the head size are padding."""
    return power_of_two(max(head_dim, 16))


def tile_shapes(head_dim: int, stored: torch.dtype, capability: tuple[int, int]) -> tuple[TileShape, ...]:
    """By height, ascending. The lowest is for decodes: a tensor core multiplies at least 16 rows, so the heads of a smaller
    group are padded, which costs nothing where memory is what is waited for.

    No shape makes a kernel for bfloat16 or float16 keep values in memory for want of registers, on compute capability 8.0,
    9.0 or 12.0; ``test_attention_compiles.py`` compiles them. stored: type of the pool.
    """
    wide = block_dim(head_dim)
    if stored == torch.float32:
        return _float32_shapes(wide)
    first, beyond = OUT_OF_SHARED_MEMORY
    keys = 64 if first <= capability < beyond else 32
    if wide <= 64:
        return TileShape(16, 128, False, 4, 5), TileShape(64, 64, True, 4, 3), TileShape(128, 64, True, 8, 3)
    if wide <= 128:
        return (
            TileShape(16, 64, False, 4, 5),
            TileShape(64, keys, True, 4, 2),
            TileShape(128, keys, True, 8, 3),
        )
    return TileShape(16, 32, False, 4, 5), TileShape(64, 32, True, 8, 2)


def _float32_shapes(wide: int) -> tuple[TileShape, ...]:
    """Products of float32 take three times the registers; these shapes are for comparing, not for speed."""
    if wide <= 64:
        return TileShape(16, 64, False, 4, 5), TileShape(64, 32, False, 8, 2)
    if wide <= 128:
        return TileShape(16, 32, False, 4, 5), TileShape(32, 32, False, 4, 2)
    return TileShape(16, 16, False, 4, 3), TileShape(32, 16, False, 8, 1)
