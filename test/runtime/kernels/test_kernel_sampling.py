"""Draws on the device against the host's sampler, and which tokens the limits let stay against a sort."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trellis.runtime.executor.contract import NO_TOKEN, SampleRow
from trellis.runtime.executor.noise import gumbel as gumbel_on_host
from trellis.runtime.executor.noise import mix as mix_on_host
from trellis.runtime.executor.sampler import filter_ordered, is_greedy, sample
from trellis.runtime.kernels import sampling
from trellis.runtime.kernels.limits import find_limits
from trellis.runtime.kernels.race import gumbel, noise_bits, sample_by_triton
from trellis.runtime.kernels.sampling import DeviceSampling, sample_by_torch, sample_on_device, signed
from trellis.runtime.kernels.sampling import noise_bits as noise_bits_by_torch
from trellis.runtime.messages import SamplingParams

COVERS = ("limits", "race")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
BY = {"triton": sample_by_triton, "torch": sample_by_torch}
ROUNDING = 1e-5  # heights in the race that are closer than this may change places
GAMMA = 0x9E3779B97F4A7C15


def row(seed: int = 0, step: int = 0, **params: float) -> SampleRow:
    return SampleRow(0, SamplingParams(**params), seed, step)  # type: ignore[arg-type]


def drawn(by: str, logits: Tensor, rows: list[SampleRow], device: torch.device) -> list[int]:
    out = torch.empty(len(rows), dtype=torch.int64, device=device)
    BY[by](logits.to(device), DeviceSampling.of(rows, device), out)
    return out.tolist()


def staying(logits: Tensor, one: SampleRow, slack: float = 0.0) -> set[int]:
    """What the host's rules leave of a stably sorted row. slack: moves the borders of top-p and min-p that far outwards."""
    p = one.params
    scaled = (logits - logits.max()) / p.temperature
    ordered, order = scaled.sort(descending=True, stable=True)
    loose = row(
        temperature=p.temperature,
        top_k=p.top_k,
        top_p=min(1.0, p.top_p + slack) if p.top_p < 1 else 1.0,
        min_p=max(0.0, p.min_p * (1 - slack)),
    )
    probs = (ordered - scaled.logsumexp(-1)).exp()
    kept = filter_ordered(probs[None], [loose], len(logits))[0] > 0
    return set(order[kept].tolist())


def heights(logits: Tensor, one: SampleRow) -> Tensor:
    scaled = (logits - logits.max()) / one.params.temperature
    return scaled.double() + torch.from_numpy(gumbel_on_host(one.seed, one.step, np.arange(len(logits))))


def assert_drawn(logits: Tensor, rows: list[SampleRow], ids: list[int]) -> None:
    """The host's tokens, or such as come out when a border or the finish is moved by rounding."""
    wanted = sample(logits.clone(), rows).token_ids
    for values, one, token, want in zip(logits, rows, ids, wanted, strict=True):
        if token == want:
            continue
        assert token in staying(values, one, ROUNDING)
        race = heights(values, one)
        certain = list(staying(values, one, -ROUNDING))
        assert race[token] >= race[certain].max() - ROUNDING


@triton.jit
def write_noise(seeds_ptr, steps_ptr, bits_ptr, noise_ptr, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    seed, step = tl.load(seeds_ptr + tl.program_id(0)), tl.load(steps_ptr + tl.program_id(0))
    place = tl.program_id(0) * count + at
    tl.store(bits_ptr + place, noise_bits(seed, step, at).to(tl.int64, bitcast=True), mask=at < count)
    tl.store(noise_ptr + place, gumbel(seed, step, at), mask=at < count)


def bits_on_host(seed: int, step: int, count: int) -> np.ndarray:
    def mixed(value: int) -> int:
        return int(mix_on_host(np.array([value % 2**64], np.uint64))[0])

    start = mixed(mixed(seed) + step * GAMMA)
    tokens = np.arange(1, count + 1, dtype=np.uint64)
    return mix_on_host(np.uint64(start) + tokens * np.uint64(GAMMA))


SEEDS = [0, 1, -1, 7, 2**63 - 1, -(2**63), 2**64 + 5, 123456789 * 2**40]
STEPS = [0, 1, 2, 77, 100_000, 3, 2**31, 5]


def test_noise_is_the_hosts_bit_by_bit(device):
    count = 3000
    seeds = torch.tensor([signed(seed) for seed in SEEDS], device=device)
    steps = torch.tensor(STEPS, device=device)
    bits = torch.empty((len(SEEDS), count), dtype=torch.int64, device=device)
    noise = torch.empty((len(SEEDS), count), device=device)
    write_noise[(len(SEEDS),)](seeds, steps, bits, noise, count, BLOCK=4096)
    want = [bits_on_host(seed, step, count) for seed, step in zip(SEEDS, STEPS, strict=True)]
    assert np.array_equal(bits.cpu().numpy().view(np.uint64), np.stack(want))
    assert torch.equal(noise_bits_by_torch(seeds, steps, count), bits)
    gumbels = [gumbel_on_host(s, t, np.arange(count)) for s, t in zip(SEEDS, STEPS, strict=True)]
    # Double precision, rounded to single: a last bit of the logarithm may be another library's.
    np.testing.assert_allclose(noise.cpu().numpy(), np.stack(gumbels), rtol=2e-7, atol=1e-12)


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 5, 40, 10**7]),
        "top_p": st.sampled_from([1e-9, 0.3, 0.5, 0.9, 0.9999999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        "seed": st.integers(-(2**70), 2**70),
        "step": st.integers(0, 2**31),
    }
)


def check_tokens(by: str, params: list[dict], vocab: int, number: int, device: torch.device) -> None:
    logits = 3 * torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(number))
    rows = [row(**one) for one in params]
    assert_drawn(logits, rows, drawn(by, logits, rows, device))


CASES = given(
    params=st.lists(PARAMS, min_size=1, max_size=4),
    vocab=st.sampled_from([1, 2, 33, 700]),
    number=st.integers(0, 1000),
)


@pytest.mark.parametrize("by", BY)
@settings(max_examples=8)
@CASES
def test_the_same_tokens_as_on_the_host(by, params, vocab, number, device):
    check_tokens(by, params, vocab, number, device)


@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
@settings(max_examples=150)
@CASES
def test_the_same_tokens_as_on_the_host_in_many_cases(by, params, vocab, number, device):
    check_tokens(by, params, vocab, number, device)


@pytest.mark.parametrize("by", BY)
def test_the_same_tokens_over_several_blocks(by, device):
    limits = [{}, {"top_k": 50}, {"top_p": 0.95}, {"top_k": 600, "top_p": 0.8}, {"min_p": 0.02}]
    limits += [{"temperature": 0.0}, {"top_p": 0.99, "min_p": 0.001}, {"top_k": 1}]
    chance = random.Random(3)
    rows = [row(chance.getrandbits(64), chance.randrange(900), **one) for one in limits]
    logits = 2 * torch.randn(len(rows), 5001, generator=torch.Generator().manual_seed(4))
    ids = drawn(by, logits, rows, device)
    assert ids == sample(logits.clone(), rows).token_ids


def kept_by_kernel(logits: Tensor, rows: list[SampleRow], device: torch.device) -> list[set[int]]:
    """Before min-p, as the cuts say."""
    params = DeviceSampling.of(rows, device)
    n, vocab = logits.shape
    best = torch.empty(n, device=device)
    cuts = torch.empty((n, 2), dtype=torch.int32, device=device)
    find_limits[(n,)](
        logits.to(device),
        vocab,
        params.temperatures,
        params.top_ks,
        params.top_ps,
        best,
        cuts,
        VOCAB=vocab,
        BLOCK=16,
    )
    distance = ((best[:, None].cpu() - logits) / params.temperatures.cpu()[:, None]).abs()
    keys, (cut, end) = distance.view(torch.int32), cuts.cpu().T[:, :, None]
    kept = (keys < cut) | ((keys == cut) & (torch.arange(vocab) < end))
    kept &= ~logits.isneginf()
    return [set(one.nonzero()[:, 0].tolist()) for one in kept]


TIES = given(
    top_k=st.sampled_from([-1, 2, 3, 7, 20, 39, 40]),
    top_p=st.sampled_from([1e-9, 0.01, 0.35, 0.7, 0.95, 1.0]),
    levels=st.integers(1, 6),
    blocked=st.integers(0, 30),
    number=st.integers(0, 10_000),
)


@settings(max_examples=6)
@TIES
def test_ties_on_the_border_stay_by_id(top_k, top_p, levels, blocked, number, device):
    check_ties(top_k, top_p, levels, blocked, number, device)


@pytest.mark.slow
@settings(max_examples=150)
@TIES
def test_ties_on_the_border_stay_by_id_in_many_cases(top_k, top_p, levels, blocked, number, device):
    check_ties(top_k, top_p, levels, blocked, number, device)


def check_ties(
    top_k: int, top_p: float, levels: int, blocked: int, number: int, device: torch.device
) -> None:
    """Logits of a few levels: nearly every border falls among equals."""
    generator = torch.Generator().manual_seed(number)
    logits = torch.randint(levels, (2, 40), generator=generator).float() * 0.75
    logits[:, torch.randperm(40, generator=generator)[:blocked]] = -math.inf
    rows = [row(top_k=top_k, top_p=top_p, temperature=t) for t in (0.5, 3.0)]
    kept = kept_by_kernel(logits, rows, device)
    for values, one, found in zip(logits, rows, kept, strict=True):
        assert staying(values, one, -ROUNDING) <= found <= staying(values, one, ROUNDING)
        if top_p == 1:
            assert found == staying(values, one)
    ids = {by: drawn(by, logits, rows, device) for by in BY}
    assert ids["triton"] == ids["torch"]
    assert all(token in found for token, found in zip(ids["triton"], kept, strict=True))


def test_shares_are_exact_where_they_can_be(device):
    """Sixteen equal tokens: each has a share of 2^-4, and top-p cuts where the sum of the better ones reaches it."""
    logits = torch.zeros(3, 16)
    rows = [row(top_p=top_p) for top_p in (0.5, 0.5 + 2**-20, 0.5 - 2**-20)]
    assert [len(kept) for kept in kept_by_kernel(logits, rows, device)] == [8, 9, 8]


@pytest.mark.parametrize("by", BY)
def test_no_token_where_there_is_no_finite_best(by, device):
    logits = torch.randn(10, 100, generator=torch.Generator().manual_seed(2))
    logits[1, 7], logits[2, 7], logits[3] = math.nan, math.inf, -math.inf
    logits[6, 99], logits[7, 0], logits[8] = math.nan, math.inf, -math.inf
    rows = [row(i, temperature=float(i >= 5), top_k=50, top_p=0.9) for i in range(10)]
    ids = drawn(by, logits, rows, device)
    assert [i for i, token in enumerate(ids) if token == NO_TOKEN] == [1, 2, 3, 6, 7, 8]
    assert_drawn(logits, rows, ids)


@pytest.mark.parametrize("by", BY)
def test_greedy_takes_the_first_of_the_best(by, device):
    logits = torch.zeros(3, 5000)
    logits[0, [40, 4000]], logits[1, [4999, 2500]] = 2.0, 1.0
    rows = [row(temperature=0.0), row(temperature=2.0, top_k=1), row(temperature=0.0, min_p=1.0)]
    assert all(is_greedy(one) for one in rows)
    assert drawn(by, logits, rows, device) == [40, 2500, 0]


@pytest.mark.parametrize("by", BY)
def test_a_draw_does_not_depend_on_its_batch(by, device):
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(5))
    rows = [row(i, i, top_p=0.9) if i % 2 else row(i, i, top_k=20) for i in range(4)]
    together = drawn(by, logits, rows, device)
    assert [drawn(by, logits[i : i + 1], rows[i : i + 1], device)[0] for i in range(4)] == together


@pytest.mark.parametrize("by", BY)
def test_rows_may_lie_apart_and_logits_stay_as_they_are(by, device):
    wide = torch.randn(2, 130, generator=torch.Generator().manual_seed(6))
    rows = [row(i, top_p=0.8) for i in range(2)]
    copy = wide.clone()
    assert drawn(by, wide[:, :97], rows, device) == drawn(by, wide[:, :97].contiguous(), rows, device)
    assert torch.equal(wide, copy)


def test_sample_on_device_fills_the_tensor_that_is_given(device):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(7)).to(device)
    params = DeviceSampling.of([row(i) for i in range(4)], device)
    out = torch.full((4,), -7, device=device)
    assert sample_on_device(logits, params, out) is out
    assert torch.equal(out, sample_on_device(logits, params))
    with pytest.raises(ValueError, match="float32"):
        sample_on_device(logits.half(), params)


def test_kernels_do_it_where_they_can_run(monkeypatch, device):
    """On a CUDA device that is so anyway; the interpreter stands for one here."""
    monkeypatch.setattr(sampling, "_has_kernels", lambda _: True)
    monkeypatch.setattr(sampling, "sample_by_torch", None)
    monkeypatch.setattr(sampling, "mask_by_torch", None)
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(8))
    words = torch.tensor([[0b1010, 0]], dtype=torch.int32)
    masked = logits.to(device)
    sampling.mask_on_device(masked, words.to(device), torch.tensor([0, -1], device=device))
    assert (masked > -math.inf).sum(1).tolist() == [2, 50]
    rows = [row(i) for i in range(2)]
    ids = sample_on_device(masked, DeviceSampling.of(rows, device)).tolist()
    assert ids == sample(masked.cpu(), rows).token_ids
