"""Weights of a decoder, from GGUF files or safetensors directories, under one set of names.

The names are those of transformers (``model.layers.0.self_attn.q_proj.weight``). A source hands out one tensor at a
time, or only a part of it, so that loading needs little more memory than the finished model.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trellis.errors import ModelLoadError
from trellis.runtime.distributed.split import Part
from trellis.runtime.models.config import ModelConfig
from trellis.runtime.models.dequantize import dequantize
from trellis.runtime.models.gguf_file import GGUFFile, GGUFTensor, block_size
from trellis.runtime.models.registry import safetensors_files

# In files, but computed from the config instead (rope) or the same as another tensor (a tied head).
IGNORED = re.compile(r"rope_freqs\.weight|.*rotary_emb\.inv_freq")

GGUF_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class WeightSource(ABC):
    """Tensors by name, each taken once. ``finish`` complains about those that nobody asked for."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self._taken: set[str] = set()

    @abstractmethod
    def names(self) -> Set[str]:
        """Every tensor of the source."""

    @abstractmethod
    def _shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def _read(self, name: str, dtype: torch.dtype, part: Part | None) -> torch.Tensor: ...

    def take(
        self, name: str, *shape: int, dtype: torch.dtype = torch.float32, part: Part | None = None
    ) -> torch.Tensor:
        """The tensor of that name, in that dtype. ModelLoadError when it is missing or of another shape.

        part: what to read of it; no more is read, where the file's format allows. shape is that of the whole all the same.
        """
        if name not in self.names():
            raise ModelLoadError(f"{self.where}: weight {name!r} is missing")
        self._taken.add(name)
        there = self._shape(name)
        if there != shape:
            raise ModelLoadError(
                f"{self.where}: weight {name!r} has shape {list(there)}; the config wants {list(shape)}"
            )
        if part is not None and part.size == 0:
            return torch.empty([0 if axis == part.axis else n for axis, n in enumerate(shape)], dtype=dtype)
        return self._read(name, dtype, part)

    def finish(self, tied_head: bool) -> None:
        """ModelLoadError when tensors are left over: the model would compute something else than was trained."""
        left = {name for name in self.names() - self._taken if not IGNORED.fullmatch(name)}
        if tied_head:
            left.discard("lm_head.weight")
        if left:
            listed = ", ".join(sorted(left)[:4]) + (", …" if len(left) > 4 else "")
            raise ModelLoadError(
                f"{self.where}: {len(left)} weights have no place in this architecture: {listed}"
            )


class SafetensorsSource(WeightSource):
    """A directory with ``model.safetensors`` or shards of it."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        super().__init__(path)
        self._handles: dict[str, Any] = {}
        for file in safetensors_files(path):
            try:
                handle: Any = safe_open(file, framework="pt")
                self._handles.update(dict.fromkeys(handle.keys(), handle))
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{file} is damaged or cut short: {error}") from error

    def names(self) -> Set[str]:
        return self._handles.keys()

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name].get_slice(name).get_shape())

    def _read(self, name: str, dtype: torch.dtype, part: Part | None) -> torch.Tensor:
        if part is None:
            whole: torch.Tensor = self._handles[name].get_tensor(name)
            return whole.to(dtype)
        slices, before = self._handles[name].get_slice(name), (slice(None),) * part.axis
        return torch.cat([slices[(*before, slice(*each))].to(dtype) for each in part.ranges], part.axis)


class GGUFSource(WeightSource):
    """A GGUF file; block formats are dequantised."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        super().__init__(file.path)
        self._config = config
        self._tensors = {hf_name(name): tensor for name, tensor in file.tensors.items()}

    def names(self) -> Set[str]:
        return self._tensors.keys()

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def _read(self, name: str, dtype: torch.dtype, part: Part | None) -> torch.Tensor:
        tensor = self._tensors[name]
        if part is not None:
            tensor, part = cut_blocks(tensor, part)
        values = dequantize(tensor, dtype)
        if part is not None:
            values = torch.cat([values.narrow(part.axis, a, b - a) for a, b in part.ranges], part.axis)
        # Only the `llama` converter reorders rows for its own rotary layout; others store them as published.
        if self._config.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            return undo_rotary_permutation(values, values.shape[0] // self._config.head_dim)
        return values


def cut_blocks(tensor: GGUFTensor, part: Part) -> tuple[GGUFTensor, Part | None]:
    """The part, as a tensor of its own; or the whole and the part again, where it does not begin and end with blocks."""
    values, width = block_size(tensor.type_id)
    *outer, last = tensor.shape
    unit = values if part.axis == len(outer) else 1  # a block is of values of the last axis
    if last % values or any(edge % unit for each in part.ranges for edge in each):
        return tensor, part
    blocks = tensor.data.reshape(*outer, last // values, width)
    places = [np.arange(first // unit, end // unit) for first, end in part.ranges]
    data = blocks.take(np.concatenate(places), part.axis)
    shape = tuple(part.size if axis == part.axis else n for axis, n in enumerate(tensor.shape))
    return GGUFTensor(tensor.name, shape, tensor.type_id, data.reshape(-1)), None


def hf_name(gguf_name: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``; unknown names stay as they are."""
    if gguf_name in GGUF_GLOBAL_NAMES:
        return GGUF_GLOBAL_NAMES[gguf_name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name)
    if match and match[2] in GGUF_LAYER_NAMES:
        return f"model.layers.{match[1]}.{GGUF_LAYER_NAMES[match[2]]}.{match[3]}"
    return gguf_name


def undo_rotary_permutation(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head back from interleaved pairs (0, d/2, 1, d/2+1, ...) to halves (0, 1, ..., d-1)."""
    rows = tensor.shape[0]
    return tensor.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)
