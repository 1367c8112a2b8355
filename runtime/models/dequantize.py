"""From the blocks of a GGUF file to values.

The formats that the packaged model is made of are undone here, a stretch of blocks at a time that stays in the caches,
straight into the dtype that is wanted; the others by the `gguf` package. Layouts:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from trellis.errors import ModelLoadError
from trellis.runtime.models.gguf_file import GGUFTensor

BLOCK = 32  # values of a block of Q4_1 and Q8_0
STRETCH = 1024  # blocks: 128 kB of float32, of which torch makes no work for several threads

# Undoes blocks (uint8 [n, bytes of a block]) into float32 [n, BLOCK].
Undo = Callable[[Tensor, Tensor], None]


def dequantize(tensor: GGUFTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """In the tensor's shape; values are computed in float32, then rounded to dtype.

    ModelLoadError for a block format that neither this module nor the `gguf` package can undo.
    """
    known = UNDO.get(tensor.type_id)
    if known is None:
        return _by_package(tensor).to(dtype)
    undo, block_bytes = known
    blocks = torch.from_numpy(tensor.data.copy()).view(-1, block_bytes)
    out = torch.empty((len(blocks), BLOCK), dtype=dtype)
    room = torch.empty((min(STRETCH, len(blocks)), BLOCK))
    for at in range(0, len(blocks), STRETCH):
        some = blocks[at : at + STRETCH]
        values = room[: len(some)]
        undo(some, values)
        out[at : at + STRETCH] = values
    return out.view(tensor.shape)


def _undo_q4_1(blocks: Tensor, values: Tensor) -> None:
    """Halves scale and minimum, then 16 bytes: byte i holds value i in its lower half and value i + 16 in its upper."""
    nibbles = blocks[:, 4:]
    values[:, :16] = nibbles & 15
    values[:, 16:] = nibbles >> 4
    values.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _undo_q8_0(blocks: Tensor, values: Tensor) -> None:
    """A half, the scale, then 32 bytes with sign."""
    values.copy_(blocks[:, 2:].view(torch.int8))
    values.mul_(_half(blocks, 0))


def _half(blocks: Tensor, at: int) -> Tensor:
    """The halves at that byte of each block: float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


UNDO: dict[int, tuple[Undo, int]] = {3: (_undo_q4_1, 20), 8: (_undo_q8_0, 34)}
"""ggml's number of a type → how it is undone, and the bytes of a block."""


def _by_package(tensor: GGUFTensor) -> Tensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize as undo_blocks

    kind = GGMLQuantizationType(tensor.type_id)
    block_bytes = GGML_QUANT_SIZES[kind][1]
    # The package works on 16 rows at a time; blocks do not depend on each other, so rows of many blocks are quicker.
    blocks = len(tensor.data) // block_bytes
    rows = tensor.data.reshape(-1, block_bytes * math.gcd(blocks, 256))
    try:
        values = undo_blocks(rows, kind)
    except NotImplementedError as error:
        raise ModelLoadError(
            f"tensor {tensor.name!r} has block format {kind.name}, which cannot be read"
        ) from error
    if not values.flags.writeable:  # a view into the file, which is mapped read-only
        values = values.copy()
    return torch.from_numpy(values).view(tensor.shape)
