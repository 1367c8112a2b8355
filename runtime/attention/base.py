"""What every attention backend does: store new keys and values, then let each token read its own sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trellis.runtime.executor.batch import Batch
from trellis.runtime.executor.contract import Extend
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

    no_graphs: str | None = "it makes tensors whose shapes depend on the lengths of the contexts"
    """Why steps with this backend cannot be captured as graphs of the device; None: they can, by ``plan_graph``."""

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        self.shape = shape
        self.pool = pool
        self.write_slots = torch.empty(0, dtype=torch.int64)
        """int64 [T], set by ``plan``: where keys and values of the batch's tokens go, for operations that store on their own."""

    @abstractmethod
    def plan(self, batch: Batch) -> None:
        """Prepare what is the same for all layers: index tensors, masks, launch shapes."""

    def plan_graph(self, batch: Batch) -> None:
        """As ``plan``, for a batch of decodes (one token an extend) that is captured, or is about to be replayed.

        Called before the capture of each number of extends, and before each replay with the same number. A batch of as many
        extends has the same tensors each time, with other contents (and as ``flat`` what they hold now); ``slots`` is as
        long as its buffer, and ``slot_starts`` says how much of it counts. What ``store`` and ``read`` launch may depend on
        the number of extends alone, and reads nothing but these tensors and such as the backend keeps for that number and
        fills here. Padding extends read and write slot 0 (the sink).
        """
        raise NotImplementedError(f"attention backend {self.name!r} has no graphs: {self.no_graphs}")

    def no_graph_for(self, extends: Sequence[Extend]) -> str | None:  # noqa: ARG002
        """Why this step of decodes would better be no replay of a graph; None if it may be one."""
        return None

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
