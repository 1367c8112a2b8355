"""A decoder whose weights the C++ library holds, packed, and which computes a whole step in one call."""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from ctypes import byref, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trellis.runtime.attention.base import AttentionShape
from trellis.runtime.executor.batch import FlatBatch
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.models.config import ModelConfig
from trellis.runtime.models.decoder import Decoder, LayerWeights
from trellis.runtime.models.rotary import rotary_frequencies, rotary_scale
from trellis.runtime.native import abi
from trellis.runtime.native.abi import DecoderStruct, Library, StepStruct
from trellis.runtime.native.quantized import Quantization, Rows

AS_GIVEN = Quantization()
FORMATS = {torch.float32: abi.FLOAT32, torch.bfloat16: abi.BFLOAT16, torch.float16: abi.FLOAT16}

# What the C++ decoder knows of a config. A field that is not named here must be as it is by default.
KNOWN_FIELDS = frozenset(
    (
        *("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"),
        *(
            "num_kv_heads",
            "head_dim",
            "context_length",
            "norm_eps",
            "rope_theta",
            "rope_scaling",
            "tied_head",
        ),
        *("qkv_bias", "output_bias", "mlp_bias", "qk_norm", "sliding_windows"),
    )
)


def unsupported(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the C++ decoder cannot run this model, or None if it can."""
    if device.type != "cpu":
        return f"it runs on CPUs, and the weights are on {device}"
    if dtype not in FORMATS:
        return f"it computes in {', '.join(str(d).removeprefix('torch.') for d in FORMATS)}, not {dtype}"
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in KNOWN_FIELDS and value != field.default:
            return f"it does not know {field.name} = {value!r} of the model's config"
    return None


class NativeDecoder:
    """Packs a copy of the weights of ``decoder``, which can be dropped afterwards. One caller at a time.

    threads: how many compute, the caller among them. quantization: how it keeps matrices. deterministic: the logits of a
    position are the same bits whatever else is in the batch, and however what is before it was computed. Raises CapacityError when the
    copy does not fit.
    """

    def __init__(
        self,
        library: Library,
        decoder: Decoder,
        threads: int,
        quantization: Quantization = AS_GIVEN,
        deterministic: bool = False,
    ) -> None:
        self.config = decoder.config
        self.dtype = decoder.dtype
        self.library = library
        self.deterministic = deterministic
        self._handle = self._create(threads)
        self._free = weakref.finalize(self, library.functions.trellis_free_decoder, self._handle)
        self._pack(decoder, quantization)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return int(self.library.functions.trellis_decoder_bytes(self._handle))

    def step(
        self,
        batch: FlatBatch,
        pool: PoolPointers,
        *,
        hidden: Tensor | None = None,
        logits: Tensor | None = None,
        seconds: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """All layers over the batch; its keys and values are in the pool afterwards.

        hidden: float32 [R, hidden_size], gets the wanted rows before the last norm. logits: float32 [R, vocab], gets their
        logits. seconds: float64 [len(abi.PARTS)], the time of each part is added to it.
        Raises IndexError for a token or a slot that does not exist.
        """
        struct = StepStruct(
            extends=len(batch.lengths),
            pool_rows=pool.rows,
            lengths=batch.lengths.ctypes.data,
            starts=batch.starts.ctypes.data,
            slots=batch.slots.ctypes.data,
            tokens=batch.token_ids.ctypes.data,
            logits_from=batch.logits_from.ctypes.data,
            keys=ctypes.addressof(pool.keys),
            values=ctypes.addressof(pool.values),
            hidden=None if hidden is None else hidden.data_ptr(),
            logits=None if logits is None else logits.data_ptr(),
            seconds=None if seconds is None else seconds.ctypes.data,
        )
        self.library.call("trellis_step", self._handle, byref(struct))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: float32 [R, hidden_size] of ``step`` → float32 [R, vocab]."""
        hidden = hidden.contiguous()
        out = torch.empty((len(hidden), self.config.vocab_size), dtype=torch.float32)
        if len(hidden):
            self.library.call("trellis_logits", self._handle, hidden.data_ptr(), len(hidden), out.data_ptr())
        return out

    def _create(self, threads: int) -> c_void_p:
        c, shape = self.config, AttentionShape.of(self.config)
        windows = np.array([window or 0 for window in shape.windows], np.int32)
        frequencies = rotary_frequencies(c).float().contiguous()
        struct = DecoderStruct(
            vocab=c.vocab_size,
            hidden=c.hidden_size,
            intermediate=c.intermediate_size,
            layers=c.num_layers,
            heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            format=FORMATS[self.dtype],
            tied=c.tied_head,
            alike=self.deterministic,
            norm_eps=c.norm_eps,
            scale=shape.scale,
            soft_cap=shape.soft_cap or 0.0,
            rotary_scale=rotary_scale(c),
            windows=windows.ctypes.data,
            frequencies=frequencies.data_ptr(),
        )
        handle = c_void_p()
        self.library.call("trellis_new_decoder", byref(struct), threads, byref(handle))
        return handle

    def _pack(self, decoder: Decoder, quantization: Quantization) -> None:
        weights = decoder.weights
        for index, layer in enumerate(weights.layers):
            self._pack_layer(index, layer, quantization)
        self._put_vector(0, "norm", weights.norm)
        self._put_matrix(quantization.rows(0, "head", weights.head), 0, "head")
        if not self.config.tied_head:
            self._put_matrix(quantization.rows(0, "embedding", weights.embedding), 0, "embedding")

    def _pack_layer(self, index: int, layer: LayerWeights, quantization: Quantization) -> None:
        for name in ("qkv", "output", "gate_up", "down"):
            rows = quantization.rows(index, name, getattr(layer, name))
            self._put_matrix(rows, index, name, getattr(layer, f"{name}_bias"))
        for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm"):
            vector = getattr(layer, name)
            if vector is not None:
                self._put_vector(index, name, vector)

    def _put_matrix(self, rows: Rows, layer: int, name: str, bias: Tensor | None = None) -> None:
        data = rows.data.contiguous()
        bias = None if bias is None else bias.float().contiguous()
        self.library.call(
            "trellis_put_matrix",
            self._handle,
            layer,
            abi.MATRICES.index(name),
            data.data_ptr(),
            rows.source,
            None if bias is None else bias.data_ptr(),
            abi.KEPT.index(rows.kept),
        )

    def _put_vector(self, layer: int, name: str, vector: Tensor) -> None:
        vector = vector.float().contiguous()
        self.library.call(
            "trellis_put_vector", self._handle, layer, abi.VECTORS.index(name), vector.data_ptr()
        )


class PoolPointers:
    """Where the keys and values of each layer lie. Holds on to the pool, so that they stay there."""

    def __init__(self, pool: KVPool) -> None:
        self.rows = len(pool.keys[0])
        self.keys: Any = (c_void_p * len(pool.keys))(*(tensor.data_ptr() for tensor in pool.keys))
        self.values: Any = (c_void_p * len(pool.values))(*(tensor.data_ptr() for tensor in pool.values))
        self._pool = pool
