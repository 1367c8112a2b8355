"""The shape of a decoder, read from GGUF metadata or from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trellis.errors import ModelLoadError
from trellis.runtime.models.gguf_file import GGUFFile, damage_reported, open_model
from trellis.runtime.models.rope import RopeScaling, required, rope_from_gguf, rope_from_hf

HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
MOST_POSITIONS = 2**31 - 1  # what 32 bits hold


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family.

    qkv_bias, output_bias, mlp_bias: which projections have biases. qk_norm: RMSNorm over each head of q and k.
    sliding_windows: one a layer; a token attends to that many tokens, itself included; None is all.
    context_length: the most positions that it is run with.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def served_with(self, context_length: int | None) -> ModelConfig:
        """The config for that context, at most the model's own; None leaves it as it is. Frequencies may depend on it."""
        if context_length is None or context_length >= self.context_length:
            return self
        return replace(self, context_length=context_length)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ModelLoadError(f"model config: {name} must be positive, not {getattr(self, name)}")
        if not 0 < self.context_length <= MOST_POSITIONS:
            raise ModelLoadError(
                f"model config: the context must be from 1 to {MOST_POSITIONS} tokens, not {self.context_length:.6g}"
            )
        if not 0 <= self.norm_eps < 1:
            raise ModelLoadError(f"model config: norm_eps must be from 0 to 1, not {self.norm_eps}")
        if any(window is not None and window < 1 for window in self.sliding_windows):
            raise ModelLoadError(
                f"model config: sliding windows must be positive, not {min(filter(None, self.sliding_windows))}"
            )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"model config: {self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelLoadError(
                f"model config: head_dim must be even for rotary embedding, not {self.head_dim}"
            )
        factors = () if self.rope_scaling is None else self.rope_scaling.factors
        if factors and len(factors) != self.head_dim // 2:
            raise ModelLoadError(
                f"model config: {self.head_dim // 2} frequencies need as many rotary factors, not {len(factors)}"
            )
        if self.rope_scaling is not None and self.rope_scaling.kind == "dynamic" and self.head_dim == 2:
            raise ModelLoadError("model config: dynamic rotary scaling needs a head_dim of 4 or more, not 2")


def load_config(model: Path | GGUFFile) -> ModelConfig:
    """The config of a GGUF file or a Hugging Face directory. Raises ModelLoadError."""
    opened = open_model(model)
    if isinstance(opened, Path):
        return config_from_directory(opened)
    with damage_reported(opened.path):
        return config_from_gguf(opened)


def config_from_directory(path: Path) -> ModelConfig:
    source = path / "config.json"
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
        return config_from_hf(data)
    except OSError as error:
        raise ModelLoadError(f"cannot read {source}: {error}") from error
    except KeyError as error:
        raise ModelLoadError(f"{source} lacks {error.args[0]!r}") from error
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ModelLoadError(f"{source} is not a valid model config: {error}") from error


def config_from_hf(data: dict[str, Any]) -> ModelConfig:
    """The config that a ``config.json`` of transformers describes. KeyError when a size is not given."""
    names = data.get("architectures") or []
    architecture = next((HF_ARCHITECTURES[name] for name in names if name in HF_ARCHITECTURES), None)
    if architecture is None:
        raise ModelLoadError(
            f"architecture {', '.join(names) or 'not named in config.json'} is not supported; "
            f"supported: {', '.join(sorted(HF_ARCHITECTURES))}"
        )
    if data.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"hidden_act {data['hidden_act']!r} is not supported; supported: silu")
    heads = int(data["num_attention_heads"])
    rope = rope_from_hf(data)
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(data["vocab_size"]),
        hidden_size=int(data["hidden_size"]),
        intermediate_size=int(data["intermediate_size"]),
        num_layers=int(data["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(data.get("num_key_value_heads") or heads),
        head_dim=int(data.get("head_dim") or data["hidden_size"] // heads),
        context_length=rope.context_length,
        norm_eps=float(data["rms_norm_eps"]),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tied_head=bool(data.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "qwen2" or (architecture != "mistral" and bool(data.get("attention_bias"))),
        output_bias=architecture in ("llama", "qwen3") and bool(data.get("attention_bias")),
        mlp_bias=architecture == "llama" and bool(data.get("mlp_bias")),
        qk_norm=architecture == "qwen3",
        sliding_windows=_hf_windows(architecture, data),
    )


def _hf_windows(architecture: str, data: dict[str, Any]) -> tuple[int | None, ...]:
    layers = int(data["num_hidden_layers"])
    window = data.get("sliding_window")
    if architecture == "llama" or not window:
        return (None,) * layers
    if architecture == "mistral":
        return (int(window),) * layers
    if not data.get("use_sliding_window", False):
        return (None,) * layers
    kinds: Sequence[str] | None = data.get("layer_types")
    if kinds is None:
        full = int(data.get("max_window_layers", layers))
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The config that a GGUF file's metadata describes."""
    architecture = file.architecture
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path}: architecture {architecture!r} is not supported; supported in GGUF files: "
            f"{', '.join(GGUF_ARCHITECTURES)}"
        )
    if "token_embd.weight" not in file.tensors:
        raise ModelLoadError(f"{file.path} has no tensor token_embd.weight")
    layers, heads = int(required(file, "block_count")), int(required(file, "attention.head_count"))
    hidden = int(required(file, "embedding_length"))
    head_dim = int(file.get("attention.key_length", hidden // heads))
    if file.get("rope.dimension_count", head_dim) != head_dim:
        raise ModelLoadError(f"{file.path}: rotary embedding of a part of each head is not supported")
    window = file.get("attention.sliding_window")
    rope = rope_from_gguf(file)
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=int(required(file, "feed_forward_length")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(file.get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        context_length=rope.context_length,
        norm_eps=float(required(file, "attention.layer_norm_rms_epsilon")),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tied_head="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_windows=(int(window) if window else None,) * layers,
    )
