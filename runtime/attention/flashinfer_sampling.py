"""Drawing tokens by flashinfer's kernels, which need no sorting.

Their random numbers depend on a row's place in the batch and on all that was drawn before: a request's seed means nothing to
them, so this is only for those who ask for it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trellis.errors import ModelLoadError
from trellis.runtime.executor.contract import NO_TOKEN, SampleRow
from trellis.runtime.kernels.sampling import DeviceSampling


class FlashInferSampler:
    """library: what to use in flashinfer's place. generator: of the device; None for torch's own. ModelLoadError where
    flashinfer is not installed."""

    def __init__(self, library: Any = None, generator: torch.Generator | None = None) -> None:
        if library is None and importlib.util.find_spec("flashinfer") is None:
            raise ModelLoadError(
                "sampling backend 'flashinfer' cannot be used: flashinfer is not installed (pip install 'trellis-lm[cuda]')"
            )
        self._library = library or importlib.import_module("flashinfer")
        self._generator = generator

    def draw(self, logits: Tensor, rows: Sequence[SampleRow], sampling: DeviceSampling) -> Tensor:
        """One token a row: int64 [N]; ``NO_TOKEN`` for a row with no finite best logit. logits: float32 [N, vocab], unchanged.
        sampling: the rows' parameters on the device. Temperature, top-k, top-p of what is left, min-p, then the draw. Waits
        for nothing."""
        best = logits.max(-1, keepdim=True)
        greedy = (sampling.temperatures == 0) | (sampling.top_ks == 1)
        temperatures = sampling.temperatures.masked_fill(greedy, 1.0)
        probs = ((logits - best.values) / temperatures[:, None]).softmax(-1)
        probs = probs.nan_to_num(nan=1 / logits.shape[1])  # of rows that have nothing to draw
        probs = self._limited(probs, rows, sampling)
        drawn = self._library.min_p_sampling_from_probs(probs, sampling.min_ps, generator=self._generator)
        ids = torch.where(greedy, best.indices[:, 0], drawn.long())
        return ids.masked_fill(~best.values[:, 0].isfinite(), NO_TOKEN)

    def _limited(self, probs: Tensor, rows: Sequence[SampleRow], sampling: DeviceSampling) -> Tensor:
        """What no row asks for is left out."""
        vocab = probs.shape[1]
        if any(0 < row.params.top_k < vocab for row in rows):
            off = (sampling.top_ks < 1) | (sampling.top_ks > vocab)
            probs = self._library.top_k_renorm_probs(probs, sampling.top_ks.masked_fill(off, vocab))
        if any(row.params.top_p < 1 for row in rows):
            probs = self._library.top_p_renorm_probs(probs, sampling.top_ps.float().clamp(max=1.0))
        return probs
