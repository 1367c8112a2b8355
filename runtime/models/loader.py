"""Loading a decoder: weights of a source, joined and cast as ``runtime/models/decoder.py`` wants them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trellis.runtime.distributed.contract import Ranks
from trellis.runtime.distributed.split import Part, Split
from trellis.runtime.models.config import ModelConfig, config_from_directory, config_from_gguf
from trellis.runtime.models.decoder import Decoder, DecoderWeights, LayerWeights
from trellis.runtime.models.gguf_file import GGUFFile, damage_reported, open_model
from trellis.runtime.models.weights import GGUFSource, SafetensorsSource, WeightSource


def load_model(
    model: Path | GGUFFile,
    dtype: torch.dtype,
    device: str = "cpu",
    ranks: Ranks | None = None,
    context_length: int | None = None,
) -> Decoder:
    """The decoder of a GGUF file or a Hugging Face directory (see ``resolve_model_path``).

    ranks: the group that shares the model; its own part is read, and the decoder's config is that of the part. context_length:
    the longest sequence that it is run with; None for the model's own (see ``ModelConfig.served_with``). Raises
    ModelLoadError: unsupported architecture, weights missing, left over, of a wrong shape, or damaged; a model that cannot be
    split among so many.
    """
    opened = open_model(model)
    if isinstance(opened, Path):
        config = config_from_directory(opened).served_with(context_length)
        return _load(config, SafetensorsSource(opened), dtype, device, ranks)
    with damage_reported(opened.path):
        config = config_from_gguf(opened).served_with(context_length)
        return _load(config, GGUFSource(opened, config), dtype, device, ranks)


def _load(
    config: ModelConfig, source: WeightSource, dtype: torch.dtype, device: str, ranks: Ranks | None
) -> Decoder:
    split = Split(config, ranks.rank, ranks.size) if ranks is not None else Split(config, 0, 1)
    weights = _Loader(split, source, dtype, torch.device(device)).load()
    source.finish(config.tied_head)
    return Decoder(split.local, weights, ranks=ranks)


class _Loader:
    def __init__(self, split: Split, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self.split = split
        self.config = split.whole
        self.source = source
        self.dtype = dtype
        self.device = device

    def load(self) -> DecoderWeights:
        c = self.config
        embedding = self._vocabulary("model.embed_tokens.weight")
        layers = tuple(self._layer(f"model.layers.{i}.") for i in range(c.num_layers))
        norm = self._tensor("model.norm.weight", c.hidden_size)
        head = embedding if c.tied_head else self._vocabulary("lm_head.weight")
        return DecoderWeights(embedding, layers, norm, head)

    def _layer(self, at: str) -> LayerWeights:
        c, split = self.config, self.split
        queries, keys, inner = split.queries(0), split.keys(0), split.inner(0)
        qkv = {"q": (c.query_size, queries), "k": (c.kv_size, keys), "v": (c.kv_size, keys)}
        projections = {f"{at}self_attn.{name}_proj": rows for name, rows in qkv.items()}
        gate_up = {f"{at}mlp.{name}_proj": (c.intermediate_size, inner) for name in ("gate", "up")}
        output, down = f"{at}self_attn.o_proj", f"{at}mlp.down_proj"
        return LayerWeights(
            attention_norm=self._tensor(f"{at}input_layernorm.weight", c.hidden_size),
            qkv=self._joined(projections, "weight", c.hidden_size),
            qkv_bias=self._joined(projections, "bias") if c.qkv_bias else None,
            query_norm=self._tensor(f"{at}self_attn.q_norm.weight", c.head_dim) if c.qk_norm else None,
            key_norm=self._tensor(f"{at}self_attn.k_norm.weight", c.head_dim) if c.qk_norm else None,
            output=self._tensor(f"{output}.weight", c.hidden_size, c.query_size, part=split.queries(1)),
            output_bias=self._added_once(f"{output}.bias") if c.output_bias else None,
            mlp_norm=self._tensor(f"{at}post_attention_layernorm.weight", c.hidden_size),
            gate_up=self._joined(gate_up, "weight", c.hidden_size),
            gate_up_bias=self._joined(gate_up, "bias") if c.mlp_bias else None,
            down=self._tensor(f"{down}.weight", c.hidden_size, c.intermediate_size, part=split.inner(1)),
            down_bias=self._added_once(f"{down}.bias") if c.mlp_bias else None,
        )

    def _tensor(self, name: str, *shape: int, part: Part | None = None) -> Tensor:
        part = None if self.split.size == 1 else part
        tensor = self.source.take(name, *shape, dtype=self.dtype, part=part)
        return tensor.to(self.device, self.dtype).contiguous()

    def _vocabulary(self, name: str) -> Tensor:
        """A row a token, and rows of zeros up to the width that all ranks have."""
        c, split = self.config, self.split
        rows = self._tensor(name, c.vocab_size, c.hidden_size, part=split.tokens())
        missing = split.vocab_rows - len(rows)
        return rows if not missing else torch.cat((rows, rows.new_zeros(missing, c.hidden_size)))

    def _added_once(self, name: str) -> Tensor | None:
        """The bias of a product that is summed over the ranks."""
        size = self.config.hidden_size
        bias = self._tensor(name, size, part=self.split.once(Part(0, ((0, size),))))
        return bias if len(bias) else None

    def _joined(self, parts: dict[str, tuple[int, Part]], kind: str, *columns: int) -> Tensor:
        """The parts stacked by rows. parts: name → all its rows, and those of this rank. Filled one at a time, so that no
        second copy exists."""
        rows = sum(part.size for _, part in parts.values())
        joined = torch.empty((rows, *columns), dtype=self.dtype, device=self.device)
        at = 0
        for name, (total, part) in parts.items():
            values = self._tensor(f"{name}.{kind}", total, *columns, part=part)
            joined[at : at + part.size] = values
            at += part.size
        return joined
