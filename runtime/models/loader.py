"""Loading a decoder: weights of a source, joined and cast as ``runtime/models/decoder.py`` wants them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trellis.runtime.models.config import ModelConfig, config_from_directory, config_from_gguf
from trellis.runtime.models.decoder import Decoder, DecoderWeights, LayerWeights
from trellis.runtime.models.gguf_file import GGUFFile, damage_reported, open_model
from trellis.runtime.models.weights import GGUFSource, SafetensorsSource, WeightSource


def load_model(model: Path | GGUFFile, dtype: torch.dtype, device: str = "cpu") -> Decoder:
    """The decoder of a GGUF file or a Hugging Face directory (see ``resolve_model_path``).

    Raises ModelLoadError: unsupported architecture, weights missing, left over, of a wrong shape, or damaged.
    """
    opened = open_model(model)
    if isinstance(opened, Path):
        return _load(config_from_directory(opened), SafetensorsSource(opened), dtype, device)
    with damage_reported(opened.path):
        config = config_from_gguf(opened)
        return _load(config, GGUFSource(opened, config), dtype, device)


def _load(config: ModelConfig, source: WeightSource, dtype: torch.dtype, device: str) -> Decoder:
    weights = _Loader(config, source, dtype, torch.device(device)).load()
    source.finish(config.tied_head)
    return Decoder(config, weights)


class _Loader:
    def __init__(
        self, config: ModelConfig, source: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.source = source
        self.dtype = dtype
        self.device = device

    def load(self) -> DecoderWeights:
        c = self.config
        embedding = self._tensor("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        layers = tuple(self._layer(f"model.layers.{i}.") for i in range(c.num_layers))
        norm = self._tensor("model.norm.weight", c.hidden_size)
        head = embedding if c.tied_head else self._tensor("lm_head.weight", c.vocab_size, c.hidden_size)
        return DecoderWeights(embedding, layers, norm, head)

    def _layer(self, at: str) -> LayerWeights:
        c = self.config
        qkv = {"q": c.query_size, "k": c.kv_size, "v": c.kv_size}
        projections = {f"{at}self_attn.{name}_proj": rows for name, rows in qkv.items()}
        gate_up = {f"{at}mlp.{name}_proj": c.intermediate_size for name in ("gate", "up")}
        output, down = f"{at}self_attn.o_proj", f"{at}mlp.down_proj"
        return LayerWeights(
            attention_norm=self._tensor(f"{at}input_layernorm.weight", c.hidden_size),
            qkv=self._joined(projections, "weight", c.hidden_size),
            qkv_bias=self._joined(projections, "bias") if c.qkv_bias else None,
            query_norm=self._tensor(f"{at}self_attn.q_norm.weight", c.head_dim) if c.qk_norm else None,
            key_norm=self._tensor(f"{at}self_attn.k_norm.weight", c.head_dim) if c.qk_norm else None,
            output=self._tensor(f"{output}.weight", c.hidden_size, c.query_size),
            output_bias=self._tensor(f"{output}.bias", c.hidden_size) if c.output_bias else None,
            mlp_norm=self._tensor(f"{at}post_attention_layernorm.weight", c.hidden_size),
            gate_up=self._joined(gate_up, "weight", c.hidden_size),
            gate_up_bias=self._joined(gate_up, "bias") if c.mlp_bias else None,
            down=self._tensor(f"{down}.weight", c.hidden_size, c.intermediate_size),
            down_bias=self._tensor(f"{down}.bias", c.hidden_size) if c.mlp_bias else None,
        )

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return self.source.take(name, *shape, dtype=self.dtype).to(self.device, self.dtype).contiguous()

    def _joined(self, parts: dict[str, int], kind: str, *columns: int) -> Tensor:
        """The parts stacked by rows. parts: name → rows. Filled one at a time, so that no second copy exists."""
        joined = torch.empty((sum(parts.values()), *columns), dtype=self.dtype, device=self.device)
        at = 0
        for name, rows in parts.items():
            joined[at : at + rows] = self.source.take(f"{name}.{kind}", rows, *columns, dtype=self.dtype)
            at += rows
        return joined
