"""Attention backends: one interface, picked by name."""

from trellis.runtime.attention.base import AttentionBackend, AttentionShape
from trellis.runtime.attention.registry import BACKENDS, create_attention

__all__ = ["BACKENDS", "AttentionBackend", "AttentionShape", "create_attention"]
