"""Attention backends by name, loaded when they are asked for. To add one: a class with the interface of ``base.py``, and its
line here."""

from __future__ import annotations

import importlib
import logging

from trellis.errors import ModelLoadError
from trellis.runtime.attention.base import AttentionBackend, AttentionShape
from trellis.runtime.executor.kv_pool import KVPool

BACKENDS: dict[str, str] = {
    "flashinfer": "flashinfer_backend:FlashInferAttention",
    "native": "native:NativeAttention",
    "torch": "torch_reference:TorchAttention",
    "triton": "triton_backend:TritonAttention",
}
BEST_ON_CUDA = ("flashinfer", "triton", "torch")

logger = logging.getLogger(__name__)


def create_attention(name: str, shape: AttentionShape, pool: KVPool) -> AttentionBackend:
    """The backend of that name. ``auto`` takes ``torch`` on a CPU, and on a CUDA device the first of ``BEST_ON_CUDA`` that
    can read this pool. ModelLoadError for an unknown name, and for a backend that cannot be had here."""
    if name != "auto":
        return _create(name, shape, pool)
    if pool.keys[0].device.type != "cuda":
        return _create("torch", shape, pool)
    for candidate in BEST_ON_CUDA[:-1]:
        try:
            return _create(candidate, shape, pool)
        except ModelLoadError as error:
            logger.info("%s", error)
    return _create(BEST_ON_CUDA[-1], shape, pool)


def _create(name: str, shape: AttentionShape, pool: KVPool) -> AttentionBackend:
    if name not in BACKENDS:
        raise ModelLoadError(
            f"attention backend {name!r} is unknown; known: auto, {', '.join(sorted(BACKENDS))}"
        )
    module, _, kind = BACKENDS[name].partition(":")
    try:
        home = importlib.import_module(f"trellis.runtime.attention.{module}")
    except ImportError as error:
        raise ModelLoadError(f"attention backend {name!r} cannot be used: {error}") from error
    backend: AttentionBackend = getattr(home, kind)(shape, pool)
    return backend
