"""How a model's rotary frequencies are stretched for long contexts, as its files say it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trellis.errors import ModelLoadError
from trellis.runtime.models.gguf_file import GGUFFile

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
GGUF_ROPE_KINDS = ("none", "linear", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """kind, and how it changes the frequencies (see ``runtime/models/rotary.py``):

    ``linear``: all are divided by ``factor``.
    ``dynamic``: their base grows with the context that is served, from ``original_context`` on.
    ``yarn``: those that turn less than ``beta_slow`` times in ``original_context`` are divided by ``factor``, those that turn
        more than ``beta_fast`` times are not, with a ramp in between, which begins and ends at whole frequencies if
        ``truncate``. Cosines and sines are multiplied by ``attention_factor``.
    ``llama3``: as yarn, with ``low_freq_factor`` and ``high_freq_factor`` turns, and a ramp over turns.
    ``factors``: one divisor a frequency, as GGUF files store it.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_context",
            "beta_fast",
            "beta_slow",
            "attention_factor",
        ):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ModelLoadError(f"rotary scaling {self.kind!r}: {name} must be positive, not {value}")
        if not self.low_freq_factor < self.high_freq_factor:
            raise ModelLoadError(
                f"rotary scaling {self.kind!r}: high_freq_factor must be more than low_freq_factor, "
                f"{self.low_freq_factor}, not {self.high_freq_factor}"
            )
        if not all(value > 0 and math.isfinite(value) for value in self.factors):
            raise ModelLoadError(f"rotary scaling {self.kind!r}: each of the factors must be positive")


@dataclass(frozen=True)
class Rope:
    """context_length: positions that the model can be run with, the stretched ones included."""

    theta: float
    scaling: RopeScaling | None
    context_length: int

    def __post_init__(self) -> None:
        if not (self.theta > 1 and math.isfinite(self.theta)):
            raise ModelLoadError(f"rotary embedding: theta must be more than 1, not {self.theta}")


def rope_from_hf(data: Mapping[str, Any]) -> Rope:
    """Of a ``config.json``: newer ones have ``rope_parameters``, older ones ``rope_theta`` and ``rope_scaling``.

    For kinds but llama3, ``max_position_embeddings`` is the context that the model was trained with, unless an original one
    is named, and the factor extends it. KeyError where a number is missing.
    """
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelLoadError("rotary parameters that differ by the kind of layer are not supported")
    theta = float(rope.get("rope_theta") or data.get("rope_theta") or 10000.0)
    context = int(data["max_position_embeddings"])
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ModelLoadError(f"rotary scaling {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    partial = rope.get("partial_rotary_factor") or data.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelLoadError(f"partial_rotary_factor {partial} is not supported; supported: 1.0")
    if kind == "default":
        return Rope(theta, None, context)
    named = data.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original = context if kind == "dynamic" else int(named or context)  # where transformers reads them
    scaling = _hf_scaling(kind, rope, original, context)
    stretched = context if kind == "llama3" else _stretched(scaling, context)
    return Rope(theta, scaling, stretched)


def _hf_scaling(kind: str, rope: Mapping[str, Any], original: int, context: int) -> RopeScaling:
    implied = (
        context / original if kind == "yarn" and original else None
    )  # which transformers allows to leave out
    factor = float(rope["factor"] if implied is None else rope.get("factor") or implied)
    if kind == "yarn":
        return RopeScaling(
            "yarn",
            factor,
            original_context=original,
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
            truncate=bool(rope.get("truncate", True)),
            attention_factor=_yarn_attention_factor(rope, factor),
        )
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return RopeScaling("llama3", factor, low, high, original)
    return RopeScaling(kind, factor, original_context=original)


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_magnitude(factor, float(mscale)) / yarn_magnitude(factor, float(all_dim))
    return yarn_magnitude(factor)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What softens the softmax over a longer context: the square root of 1/t in Peng et al. 2023, arXiv:2309.00071, (22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_from_gguf(file: GGUFFile) -> Rope:
    """Of a GGUF file's metadata. Its ``context_length`` is that of training, unless an original one is named."""
    context = int(required(file, "context_length"))
    theta = float(file.get("rope.freq_base", 10000.0))
    if "rope_freqs.weight" in file.tensors:
        factors = np.frombuffer(file.tensors["rope_freqs.weight"].data, np.float32)
        return Rope(theta, RopeScaling("factors", factors=tuple(factors.tolist())), context)
    kind = file.get("rope.scaling.type", "none")
    if kind == "none":
        return Rope(theta, None, context)
    if kind not in GGUF_ROPE_KINDS:
        raise ModelLoadError(
            f"{file.path}: rotary scaling {kind!r} is not supported; supported: {', '.join(GGUF_ROPE_KINDS)}, rope_freqs"
        )
    factor = float(required(file, "rope.scaling.factor"))
    original = int(file.get("rope.scaling.original_context_length") or context)
    if kind == "linear":
        scaling = RopeScaling("linear", factor, original_context=original)
    else:
        scaling = _gguf_yarn(file, factor, original)
    return Rope(theta, scaling, _stretched(scaling, context))


def _gguf_yarn(file: GGUFFile, factor: float, original: int) -> RopeScaling:
    """As llama.cpp computes it (``rope_yarn`` in ggml): the magnitude of the paper, times a factor of the file's own."""
    extrapolation = float(file.get("rope.scaling.yarn_ext_factor", 1.0))
    if extrapolation != 1.0:
        raise ModelLoadError(
            f"{file.path}: rope.scaling.yarn_ext_factor {extrapolation} is not supported; supported: 1.0"
        )
    own = file.get("rope.scaling.yarn_attn_factor") or file.get("rope.scaling.attn_factor") or 1.0
    return RopeScaling(
        "yarn",
        factor,
        original_context=original,
        beta_fast=float(file.get("rope.scaling.yarn_beta_fast") or 32),
        beta_slow=float(file.get("rope.scaling.yarn_beta_slow") or 1),
        attention_factor=float(own) * yarn_magnitude(factor),
    )


def _stretched(scaling: RopeScaling, context: int) -> int:
    return max(context, int(scaling.original_context * scaling.factor))


def required(file: GGUFFile, key: str) -> Any:
    """Metadata of the file's architecture; ModelLoadError if it has none of that name."""
    value = file.get(key)
    if value is None:
        raise ModelLoadError(f"{file.path} lacks {file.architecture}.{key}")
    return value
