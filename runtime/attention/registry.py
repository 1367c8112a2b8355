"""Attention backends by name. To add one: a class with the interface of ``base.py``, and its line here."""

from __future__ import annotations

from trellis.errors import ModelLoadError
from trellis.runtime.attention.base import AttentionBackend, AttentionShape
from trellis.runtime.attention.native import NativeAttention
from trellis.runtime.attention.torch_reference import TorchAttention
from trellis.runtime.executor.kv_pool import KVPool

BACKENDS: dict[str, type[AttentionBackend]] = {
    TorchAttention.name: TorchAttention,
    NativeAttention.name: NativeAttention,
}


def create_attention(name: str, shape: AttentionShape, pool: KVPool) -> AttentionBackend:
    """The backend of that name (``auto`` takes the best one here). ModelLoadError for an unknown name."""
    chosen = TorchAttention.name if name == "auto" else name
    if chosen not in BACKENDS:
        raise ModelLoadError(
            f"attention backend {name!r} is unknown; known: auto, {', '.join(sorted(BACKENDS))}"
        )
    return BACKENDS[chosen](shape, pool)
