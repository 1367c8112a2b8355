"""A step on a device: as a graph where that can be, else kernel by kernel. Everything is launched, nothing waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trellis.runtime.attention.base import AttentionBackend
from trellis.runtime.cuda.device import Device
from trellis.runtime.cuda.graphs import DecodeGraphs
from trellis.runtime.cuda.staging import Staging
from trellis.runtime.cuda.tokens import TokenTable
from trellis.runtime.executor.contract import Extend
from trellis.runtime.executor.step import EAGER_VALUES, LogitsRows
from trellis.runtime.models.decoder import Decoder


class DeviceStep:
    """Implements ``trellis.runtime.executor.step.Step``. graphs: None never replays one."""

    name = "device"

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        device: Device,
        tokens: TokenTable,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.graphs = graphs
        self.graph_steps = 0
        self.eager_steps: Counter[str] = Counter()
        """How many were no replay, by the reason."""
        self._tokens = tokens
        self._staging = Staging(device)

    def forward(self, extends: Sequence[Extend]) -> LogitsRows:
        reason = "graphs are switched off" if self.graphs is None else self.graphs.why_not(extends)
        if self.graphs is not None and reason is None:
            hidden, rows = self.graphs.run(extends)
            self.graph_steps += 1
        else:
            hidden, rows = self._run(extends)
            self.eager_steps[str(reason)] += 1
        wanted = hidden if rows is None else hidden.index_select(0, rows)
        eager = 0 < len(wanted) * self.model.config.vocab_size <= EAGER_VALUES
        return LogitsRows(self.model.logits(wanted) if eager else None, wanted, self.model.logits)

    def stats(self) -> dict[str, Any]:
        """graph_steps; eager_steps: reason → how many; captured: numbers of requests that have a graph."""
        captured = [] if self.graphs is None else list(self.graphs.captured)
        return {
            "graph_steps": self.graph_steps,
            "eager_steps": dict(self.eager_steps),
            "captured": captured,
        }

    def _run(self, extends: Sequence[Extend]) -> tuple[Tensor, Tensor]:
        staged = self._staging.batch(extends)
        batch, token_ids = staged.batch, staged.batch.token_ids
        if staged.follows is not None:
            token_ids = self._tokens.fill_in(token_ids, staged.follows)
        self.attention.plan(batch)
        return self.model.forward(token_ids, batch.positions, self.attention), batch.logits_rows
