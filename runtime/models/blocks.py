"""The quantised blocks of a GGUF file, as they are, for kernels that compute with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trellis.runtime.models.config import ModelConfig
from trellis.runtime.models.gguf_file import GGUFFile, GGUFTensor, damage_reported, open_model
from trellis.runtime.models.weights import hf_name, undo_rotary_permutation

# Types of values that are not blocks, by ggml's numbers: float32, float16, bfloat16.
FLOATS = frozenset({0, 1, 30})

LAYER_PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class Blocks:
    """A matrix of the decoder, in its parts. heads: for each part how many heads' rows the file has in another order
    (see ``undo_rotary_permutation``), or 0."""

    parts: tuple[GGUFTensor, ...]
    heads: tuple[int, ...]

    @property
    def kinds(self) -> frozenset[int]:
        """The types of its parts, by ggml's numbers; none of ``FLOATS`` is among them."""
        return frozenset(part.type_id for part in self.parts)

    def rows(self) -> torch.Tensor:
        """uint8 [outputs, bytes of an output's blocks]: a copy. For parts that are all of one type."""
        joined = []
        for part, heads in zip(self.parts, self.heads, strict=True):
            rows = torch.from_numpy(part.data.copy()).view(part.shape[0], -1)
            joined.append(undo_rotary_permutation(rows, heads) if heads else rows)
        return torch.cat(joined)


def read_blocks(model: Path | GGUFFile, config: ModelConfig) -> dict[tuple[int, str], Blocks]:
    """(layer, name as in ``LayerWeights``) → blocks, for matrices that are wholly in blocks; the head and the embedding are
    (0, "head") and (0, "embedding"). Empty for a directory. Raises ModelLoadError for a damaged file."""
    opened = open_model(model)
    if isinstance(opened, Path):
        return {}
    with damage_reported(opened.path):
        tensors = {hf_name(name): tensor for name, tensor in opened.tensors.items()}
        embedding = "model.embed_tokens"
        head = embedding if config.tied_head else "lm_head"
        wanted: dict[tuple[int, str], tuple[str, ...]] = {
            (0, "head"): (head,),
            (0, "embedding"): (embedding,),
        }
        for layer in range(config.num_layers):
            for name, parts in LAYER_PARTS.items():
                wanted[layer, name] = tuple(f"model.layers.{layer}.{part}" for part in parts)
        found = {key: _blocks(tensors, parts, config) for key, parts in wanted.items()}
    return {key: blocks for key, blocks in found.items() if blocks is not None}


def _blocks(tensors: Mapping[str, GGUFTensor], names: tuple[str, ...], config: ModelConfig) -> Blocks | None:
    parts = tuple(tensors[f"{name}.weight"] for name in names)
    if any(part.type_id in FLOATS for part in parts):
        return None
    permuted = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    heads = (
        permuted.get(name.rpartition(".")[2], 0) if config.architecture == "llama" else 0 for name in names
    )
    return Blocks(parts, tuple(heads))
