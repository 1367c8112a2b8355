"""What only a CUDA device can show of the kernels beside attention: real sizes, no waiting, graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from trellis.runtime.executor.contract import SampleRow
from trellis.runtime.executor.sampler import sample
from trellis.runtime.kernels.launch import why_not
from trellis.runtime.kernels.sampling import DeviceSampling, mask_on_device, sample_by_torch, sample_on_device
from trellis.runtime.messages import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB = 128_256
LIMITS = [
    {},
    {"temperature": 0.0},
    {"top_k": 50},
    {"top_p": 0.95},
    {"top_k": 5000, "top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 1.7, "top_p": 0.999, "min_p": 0.001},
]


@pytest.fixture
def unsynchronised() -> Iterator[Callable[[], None]]:
    """What is called makes every wait for the device an error from then on."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def make_rows(n: int) -> list[SampleRow]:
    return [SampleRow(i, SamplingParams(**LIMITS[i % len(LIMITS)]), 1000 + i, i) for i in range(n)]


def make_logits(n: int) -> torch.Tensor:
    return 2.5 * torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("n", [1, 7, 256])
def test_draws_are_the_hosts(n):
    rows, logits = make_rows(n), make_logits(n)
    ids = sample_on_device(logits.cuda(), DeviceSampling.of(rows, "cuda")).tolist()
    # A fast exponential moves the border of top-p by its rounding; a token there is drawn once in thousands of rows.
    wanted = sample(logits.clone(), rows).token_ids
    assert sum(a != b for a, b in zip(ids, wanted, strict=True)) <= n // 100


def test_kernels_and_torch_agree_and_never_wait(unsynchronised):
    assert why_not(torch.device("cuda")) is None
    logits, params = make_logits(64).cuda(), DeviceSampling.of(make_rows(64), "cuda")
    words = torch.randint(-(2**31), 2**31, (5, VOCAB // 32), dtype=torch.int32, device="cuda")
    mask_of_row = torch.arange(64, device="cuda") % 6 - 1
    out = torch.empty(64, dtype=torch.int64, device="cuda")
    by_torch = torch.empty_like(out)

    def run() -> None:
        mask_on_device(logits, words, mask_of_row)
        sample_on_device(logits, params, out)
        sample_by_torch(logits, params, by_torch)

    run()
    torch.cuda.synchronize()
    unsynchronised()
    run()
    torch.cuda.set_sync_debug_mode("default")
    assert (out != by_torch).sum().item() <= 1


def test_draws_can_be_captured_and_follow_their_tensors():
    logits, rows = make_logits(8).cuda(), make_rows(8)
    params = DeviceSampling.of(rows, "cuda")
    out = torch.empty(8, dtype=torch.int64, device="cuda")
    sample_on_device(logits, params, out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_on_device(logits, params, out)
    for step in (5, 6):
        params.steps.fill_(step)
        graph.replay()
        assert torch.equal(out, sample_on_device(logits, params))
