"""The model as the scheduler drives it: extends in, sampled tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trellis.errors import ModelLoadError
from trellis.runtime.attention.base import AttentionShape
from trellis.runtime.attention.registry import create_attention
from trellis.runtime.executor.batch import pack
from trellis.runtime.executor.contract import Extend, Logits, Sampled, SampleRow
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.executor.sampler import sample, token_logprobs
from trellis.runtime.messages import TopLogprobs
from trellis.runtime.models.decoder import Decoder
from trellis.runtime.models.loader import load_model
from trellis.runtime.models.registry import resolve_model_path

# Logits are computed at once up to this many values (256 MiB), and beyond that when they are read, so that scoring a
# long prompt over a large vocabulary does not need gigabytes.
EAGER_VALUES = 64 << 20
SCORE_ROWS = 64


class LogitsRows:
    """The rows that were asked for in one forward: their hidden states [R, hidden], and logits made from them."""

    def __init__(self, model: Decoder, hidden: Tensor) -> None:
        self._model = model
        self._hidden = hidden
        eager = len(hidden) * model.config.vocab_size <= EAGER_VALUES
        self._values = model.logits(hidden) if eager and len(hidden) else None

    def __len__(self) -> int:
        return len(self._hidden)

    def take(self, rows: Sequence[int]) -> Tensor:
        """A fresh copy of some rows: float32 [len(rows), vocab]."""
        index = torch.tensor(rows, dtype=torch.int64, device=self._hidden.device)
        if self._values is not None:
            return self._values.index_select(0, index)
        return self._model.logits(self._hidden.index_select(0, index))


class ModelRunner:
    """Implements ``trellis.runtime.executor.contract.Runner``. One caller at a time: the pool and the attention plan
    belong to the forward in progress."""

    def __init__(self, model: Decoder, num_slots: int, attention: str = "auto") -> None:
        self.model = model
        self.config = model.config
        self.vocab_size = model.config.vocab_size
        self.pool = KVPool(model.config, num_slots, model.dtype, str(model.device))
        self.attention = create_attention(attention, AttentionShape.of(model.config), self.pool)

    @torch.inference_mode()
    def forward(self, extends: Sequence[Extend]) -> LogitsRows:
        """Compute all extends as one ragged batch; their K/V is in the pool afterwards."""
        batch = pack(extends, self.model.device)
        self.attention.plan(batch)
        hidden = self.model.forward(batch.token_ids, batch.positions, self.attention)
        return LogitsRows(self.model, hidden.index_select(0, batch.logits_rows))

    @torch.inference_mode()
    def sample(self, logits: Logits, rows: Sequence[SampleRow]) -> Sampled:
        """One token a row (see ``runtime/executor/sampler.py``)."""
        if not rows:
            return Sampled([], [], [])
        return sample(_own(logits).take([row.row for row in rows]), rows)

    @torch.inference_mode()
    def score(
        self, logits: Logits, rows: Sequence[int], token_ids: Sequence[int], top_logprobs_num: int
    ) -> tuple[list[float], list[TopLogprobs]]:
        """log-softmax of ``token_ids[i]`` at ``rows[i]``, and the best alternatives there."""
        values: list[float] = []
        top: list[TopLogprobs] = []
        for at in range(0, len(rows), SCORE_ROWS):
            part = slice(at, at + SCORE_ROWS)
            some = token_logprobs(_own(logits).take(rows[part]), token_ids[part], top_logprobs_num)
            values += some[0]
            top += some[1]
        return values, top


def _own(logits: Logits) -> LogitsRows:
    if not isinstance(logits, LogitsRows):
        raise TypeError(f"these logits are a {type(logits).__name__}; a runner reads only its own")
    return logits


def build_runner(
    model_path: str | Path,
    dtype: str = "auto",
    attention: str = "auto",
    num_slots: int = 16384,
    *,
    device: str = "cpu",
    num_threads: int | None = None,
) -> ModelRunner:
    """Load a model (a name or a path) and give it a pool of ``num_slots`` token slots.

    dtype: ``auto``, ``float32`` or ``bfloat16``. num_threads: threads of torch in this process; None leaves its own
    choice. Raises ModelLoadError, and CapacityError when the pool does not fit.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    path = resolve_model_path(str(model_path))
    return ModelRunner(load_model(path, resolve_dtype(dtype, device), device), num_slots, attention)


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """``auto`` is bfloat16 where the device multiplies it natively (twice as fast as float32 then), else float32."""
    if name == "auto":
        native = has_native_bfloat16() if device == "cpu" else True
        return torch.bfloat16 if native else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise ModelLoadError(f"dtype {name!r} is unknown; known: auto, {', '.join(sorted(known))}")
    return known[name]


def has_native_bfloat16() -> bool:
    """Whether this CPU has bfloat16 products (AVX-512 BF16, AMX, or Arm's bf16), by the kernel's list of features."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return False
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(features)
