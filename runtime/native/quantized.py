"""How the matrices of a decoder are kept: in its own dtype, or as integers with scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from trellis.errors import ModelLoadError
from trellis.runtime.executor.contract import QUANTIZATIONS
from trellis.runtime.models.blocks import Blocks, read_blocks
from trellis.runtime.models.config import ModelConfig
from trellis.runtime.models.gguf_file import GGUFFile

# ggml's numbers of the block types that the kernels read: Q4_0, Q4_1, Q4_K; Q8_0.
FOUR_BITS = frozenset({2, 3, 12})
EIGHT_BITS = frozenset({8})

# What int4 keeps at 8 bits, unless the file has it at 4: 4 bits show most there.
EDGES = frozenset({"head", "embedding"})

# The codes of ``enum Source`` for floats; blocks have ggml's numbers.
FLOATS = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True)
class Rows:
    """What the kernels make a matrix of. kept: one of ``abi.KEPT``. source: code of what ``data`` holds, a row for each
    output."""

    kept: str
    source: int
    data: Tensor


@dataclass(frozen=True)
class Quantization:
    """name: one of ``QUANTIZATIONS``. blocks: what the model's file has in blocks, at 4 or 8 bits or otherwise."""

    name: str = "none"
    blocks: Mapping[tuple[int, str], Blocks] = field(default_factory=dict)

    def rows(self, layer: int, name: str, matrix: Tensor) -> Rows:
        """matrix: the values, float32, bfloat16 or float16 [outputs, inputs], of (layer, name) as in ``read_blocks``."""
        if self.name == "none":
            return _floats("own", matrix)
        blocks = self.blocks.get((layer, name))
        at_8_bits = self.name == "int8" or name in EDGES
        if blocks and len(blocks.kinds) == 1:
            (kind,) = blocks.kinds
            if kind in FOUR_BITS and self.name != "int8":
                return Rows("q4", kind, blocks.rows())
            if kind in EIGHT_BITS and (at_8_bits or self.name == "file"):
                return Rows("q8", kind, blocks.rows())
        if self.name == "file":
            return _floats("q8" if blocks else "own", matrix)
        return _floats("q8" if at_8_bits else "q4", matrix)


def read_quantization(name: str, path: Path | GGUFFile, config: ModelConfig) -> Quantization:
    """Raises ModelLoadError for an unknown name, and for ``file`` where the file has nothing quantised."""
    if name not in QUANTIZATIONS:
        raise ModelLoadError(f"quantization {name!r} is unknown; known: {', '.join(QUANTIZATIONS)}")
    if name == "none":
        return Quantization()
    blocks = read_blocks(path, config)
    if name == "file" and not blocks:
        raise ModelLoadError(
            f"{path} holds no quantised weights, so quantization 'file' has nothing to keep; take int8 or int4"
        )
    return Quantization(name, blocks)


def _floats(kept: str, matrix: Tensor) -> Rows:
    if matrix.dtype not in FLOATS:  # float16: what it holds is the same in float32
        matrix = matrix.float()
    return Rows(kept, FLOATS[matrix.dtype], matrix)
