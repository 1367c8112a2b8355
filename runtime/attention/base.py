"""What every attention backend does: store new keys and values, then let each token read its own sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from trellis.runtime.executor.batch import Batch
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.models.config import ModelConfig


@dataclass(frozen=True)
class AttentionShape:
    """scale: what scores are multiplied by. windows: one a layer; a token at position p reads positions
    p - window + 1 .. p, or all up to p where it is None. soft_cap: scores become cap * tanh(score / cap)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...]
    soft_cap: float | None = None

    @staticmethod
    def of(config: ModelConfig) -> AttentionShape:
        return AttentionShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.head_dim**-0.5,
            config.sliding_windows,
        )


class AttentionBackend(ABC):
    """Attention of a ragged batch over the slot pool. A step is ``plan`` once, then ``store`` and ``read`` for each layer."""

    name: str

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        self.shape = shape
        self.pool = pool

    @abstractmethod
    def plan(self, batch: Batch) -> None:
        """Prepare what is the same for all layers: index tensors, masks, launch shapes."""

    @abstractmethod
    def store(self, k: Tensor, v: Tensor, layer: int) -> None:
        """Put keys and values of the batch's tokens into the pool. k, v: [T, num_kv_heads, head_dim], rotary applied."""

    @abstractmethod
    def read(self, q: Tensor, layer: int) -> Tensor:
        """What the batch's tokens find in their sequences. q: [T, num_heads, head_dim], rotary applied → the same shape.

        All keys and values of the batch must be in the pool by then, so that an extend may read slots which another
        extend of the same batch wrote.
        """

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """``store``, then ``read``."""
        self.store(k, v, layer)
        return self.read(q, layer)
