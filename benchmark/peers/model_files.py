"""The same weights for every engine, in the form that each of them reads.

The engines that take a Hugging Face directory get one with the dequantised values in bfloat16, those that read GGUF get
a file with the dequantised values in float16, and llama.cpp at 4 bits gets the file as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trellis.errors import ModelLoadError
from trellis.runtime.models.config import ModelConfig, config_from_gguf
from trellis.runtime.models.gguf_file import GGUFFile, read_gguf
from trellis.runtime.models.gguf_tokenizer import build_tokenizer
from trellis.runtime.models.registry import resolve_model_path
from trellis.runtime.models.weights import GGUFSource, dequantize


@dataclass(frozen=True)
class ModelFiles:
    """gguf: as published. gguf_f16: the same in float16. directory: a Hugging Face directory, in bfloat16."""

    gguf: Path
    gguf_f16: Path
    directory: Path

    def as_settings(self) -> dict[str, str]:
        return {"gguf": str(self.gguf), "gguf_f16": str(self.gguf_f16), "directory": str(self.directory)}


def prepare(name_or_path: str, cache: Path) -> ModelFiles:
    """Write what is not there yet under the folder `cache`. ModelLoadError for what is no Llama-like GGUF file."""
    path = resolve_model_path(name_or_path)
    if path.is_dir():
        raise ModelLoadError(
            f"{path} is a directory; the peers are compared on a GGUF file, which all can be given"
        )
    folder = cache / "models" / f"{path.stem}-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    files = ModelFiles(path, folder / "model-f16.gguf", folder / "bfloat16")
    gguf = read_gguf(path)
    _once(files.gguf_f16, lambda target: write_gguf_f16(gguf, target))
    _once(files.directory, lambda target: write_directory(gguf, target))
    return files


def _once(target: Path, write: Callable[[Path], None]) -> None:
    """Write beside the target, then move: what stands at the target is always whole."""
    if target.exists():
        return
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        write(made)
        if target.exists():  # another process was quicker
            return
        os.replace(made, target) if made.is_file() else shutil.move(made, target)


def write_gguf_f16(file: GGUFFile, target: Path) -> None:
    """The file with every block format undone to float16 and its metadata kept; vectors in float32, as is usual."""
    from gguf import GGUFReader, GGUFWriter
    from gguf.constants import GGUFValueType, LlamaFileType

    writer = GGUFWriter(target, file.architecture)
    for key, value in GGUFReader(file.path).fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kind, inner = value.types[0], value.types[-1]
        writer.add_key_value(key, value.contents(), kind, inner if kind is GGUFValueType.ARRAY else None)
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    for name, tensor in file.tensors.items():
        values = dequantize(tensor)
        writer.add_tensor(name, (values if values.dim() == 1 else values.half()).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_directory(file: GGUFFile, target: Path) -> None:
    """config.json, model.safetensors in bfloat16, and the tokenizer."""
    from safetensors.torch import save_file

    config = config_from_gguf(file)
    source = GGUFSource(file, config)
    target.mkdir()
    tensors: dict[str, torch.Tensor] = {
        name: source.take(name, *_shape(file, name)).to(torch.bfloat16).contiguous()
        for name in sorted(source.names())
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(hf_config(file, config), indent=1), encoding="utf-8")
    build_tokenizer(file).save(str(target / "tokenizer.json"))
    tokens = file.metadata["tokenizer.ggml.tokens"]
    named = {
        f"{kind}_token": tokens[file.metadata[f"tokenizer.ggml.{kind}_token_id"]]
        for kind in ("bos", "eos")
        if f"tokenizer.ggml.{kind}_token_id" in file.metadata
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, **named}
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _shape(file: GGUFFile, name: str) -> tuple[int, ...]:
    from trellis.runtime.models.weights import hf_name

    return next(tensor.shape for given, tensor in file.tensors.items() if hf_name(given) == name)


def hf_config(file: GGUFFile, config: ModelConfig) -> dict[str, Any]:
    """What transformers and vLLM call the sizes of a plain Llama. ModelLoadError for another architecture."""
    if config.architecture != "llama" or config.rope_scaling is not None:
        raise ModelLoadError(
            f"{file.path}: the comparison writes config.json for plain Llama models only, not {config.architecture!r}"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
