"""Sampling by flashinfer's functions, of which only the documented meaning is used here."""

from __future__ import annotations

import importlib.util
import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trellis.errors import InvalidRequestError, ModelLoadError
from trellis.runtime.attention.flashinfer_sampling import FlashInferSampler
from trellis.runtime.config import ServerConfig
from trellis.runtime.cuda.choices import choose_device
from trellis.runtime.cuda.sampling import draw_later
from trellis.runtime.executor.contract import NO_TOKEN, SampleRow
from trellis.runtime.executor.sampler import filter_ordered
from trellis.runtime.kernels.sampling import DeviceSampling
from trellis.runtime.messages import SamplingParams

VOCAB = 12


def top_k_renorm_probs(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    assert (probs.dtype, top_k.dtype) == (torch.float32, torch.int32)
    assert ((top_k >= 1) & (top_k <= probs.shape[1])).all()
    rank = probs.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    kept = probs * (rank < top_k[:, None])
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_probs(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    assert (probs.dtype, top_p.dtype) == (torch.float32, torch.float32)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.zeros_like(probs).scatter(-1, order, ordered * (before < top_p[:, None]))
    return kept / kept.sum(-1, keepdim=True)


def min_p_sampling_from_probs(
    probs: torch.Tensor, min_p: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    assert probs.dtype is min_p.dtype is torch.float32
    assert probs.isfinite().all()
    kept = probs * (probs >= min_p[:, None] * probs.amax(-1, keepdim=True))
    return torch.multinomial(kept, 1, generator=generator)[:, 0].int()


FUNCTIONS = (top_k_renorm_probs, top_p_renorm_probs, min_p_sampling_from_probs)


def library(called: list[str]) -> SimpleNamespace:
    def counted(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            called.append(function.__name__)
            return function(*args, **options)

        return call

    return SimpleNamespace(**{function.__name__: counted(function) for function in FUNCTIONS})


def draw(logits: torch.Tensor, params: list[SamplingParams], called: list[str] | None = None) -> torch.Tensor:
    rows = [SampleRow(i, each, seed=i, step=0) for i, each in enumerate(params)]
    sampler = FlashInferSampler(library([] if called is None else called), torch.Generator().manual_seed(0))
    before = logits.clone()
    ids = sampler.draw(logits, rows, DeviceSampling.of(rows))
    assert torch.equal(logits, before)
    assert ids.dtype is torch.int64
    return ids


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=1.5, min_p=0.3),
        SamplingParams(temperature=0.9, top_k=6, top_p=0.8, min_p=0.1),
    ],
)
def test_draws_follow_the_filtered_distribution(params):
    """As our own sampler filters it. The standard deviation of a share of 4,000 draws is at most 0.008."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2)).repeat(4000, 1)
    ids = draw(logits, [params] * len(logits))
    got = torch.bincount(ids, minlength=VOCAB) / len(ids)
    ordered, order = (logits[:1] / params.temperature).softmax(-1).sort(-1, descending=True)
    kept = filter_ordered(ordered, [SampleRow(0, params, seed=0, step=0)], VOCAB)
    want = torch.zeros(1, VOCAB, dtype=torch.float64).scatter(-1, order, kept)[0]
    want = want / want.sum()
    assert not got[want == 0].any()
    torch.testing.assert_close(got.double(), want, atol=0.04, rtol=0)


def test_greedy_rows_and_rows_with_nothing_to_draw():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[1] = -math.inf
    logits[2, 3:] = -math.inf
    params = [SamplingParams(temperature=0.0), *[SamplingParams()] * 2, SamplingParams(top_k=1)]
    ids = draw(logits, params)
    assert ids[0] == logits[0].argmax()
    assert ids[1] == NO_TOKEN
    assert ids[2] < 3
    assert ids[3] == logits[3].argmax()


def test_only_what_a_row_asks_for_is_called():
    called: list[str] = []
    logits = torch.zeros(2, VOCAB)
    draw(logits, [SamplingParams(), SamplingParams(top_k=VOCAB + 5)], called)
    assert called == ["min_p_sampling_from_probs"]
    called.clear()
    draw(logits, [SamplingParams(), SamplingParams(top_k=2, top_p=0.5)], called)
    assert called == ["top_k_renorm_probs", "top_p_renorm_probs", "min_p_sampling_from_probs"]


def test_it_draws_for_a_device_where_it_was_asked_for():
    device = SimpleNamespace(where=torch.device("cpu"), pinned=lambda n, dtype: torch.empty(n, dtype=dtype))
    called: list[str] = []
    sampler = FlashInferSampler(library(called))
    rows = [SampleRow(0, SamplingParams(top_k=2), seed=0, step=0)]
    logits = torch.tensor([[0.0, 9.0, 8.0, -9.0]])
    assert int(draw_later(logits, rows, device, sampler)) in (1, 2)  # type: ignore[arg-type]
    assert called == ["top_k_renorm_probs", "min_p_sampling_from_probs"]


def test_on_a_cpu_it_is_refused():
    with pytest.raises(InvalidRequestError, match="sampling_backend: flashinfer draws on a GPU"):
        choose_device(ServerConfig("m", device="cpu", sampling_backend="flashinfer"))


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="flashinfer is installed here")
def test_without_the_library():
    with pytest.raises(ModelLoadError, match="flashinfer is not installed"):
        FlashInferSampler()


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed on this machine"
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_library_has_these_arguments(function):
    import flashinfer

    real = inspect.signature(getattr(flashinfer, function.__name__)).parameters
    mine = list(inspect.signature(function).parameters)
    assert list(real)[:2] == mine[:2]
    assert set(mine) <= set(real)
