"""The sampler against exact probabilities and against the same rules written naively."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis.runtime.executor.contract import NO_TOKEN, SampleRow
from trellis.runtime.executor.noise import GAMMA, gumbel, mix
from trellis.runtime.executor.sampler import CANDIDATES, sample, token_logprobs
from trellis.runtime.messages import SamplingParams

NO_HISTORY = np.empty(0, np.int32)


def row(seed: int = 0, step: int = 0, **kwargs: object) -> SampleRow:
    own = {k: kwargs.pop(k) for k in ("mask", "forbidden", "history", "output_start") if k in kwargs}
    report = {k: kwargs.pop(k) for k in ("want_logprob", "top_logprobs_num") if k in kwargs}
    return SampleRow(0, SamplingParams(**kwargs), seed, step, **own, **report)  # type: ignore[arg-type]


def mask_of(allowed: set[int], vocab: int) -> np.ndarray:
    words = np.zeros((vocab + 31) // 32, np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


def frequencies(logits: torch.Tensor, n: int = 4000, **kwargs: object) -> np.ndarray:
    """Share of each token over n seeds."""
    rows = [row(seed=seed, **kwargs) for seed in range(n)]
    ids = sample(logits.expand(n, -1).clone(), rows).token_ids
    return np.bincount(ids, minlength=len(logits)) / n


def naive_support(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Tokens that may be drawn: top-k, then top-p of what is left, then min-p."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    kept = order[:top_k] if 0 < top_k < len(logits) else order
    probs = {i: math.exp(logits[i] - logits.max()) for i in kept}
    total = sum(probs.values())
    nucleus, mass = set(), 0.0
    for i in kept:
        if top_p < 1 and mass >= top_p:
            break
        nucleus.add(i)
        mass += probs[i] / total
    return {i for i in nucleus if probs[i] >= min_p * max(probs.values())}


def test_mix_gives_the_known_numbers_of_splitmix64():
    # The stream of seed 1234567, as published with several implementations of the generator.
    states = np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * GAMMA
    assert mix(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_noise_depends_on_seed_step_and_token_alone():
    tokens = np.arange(20_000)
    noise = gumbel(9, 3, tokens)
    assert gumbel(9, 3, tokens[::-1]).tolist() == noise[::-1].tolist()
    assert gumbel(9 + 2**64, 3, tokens).tolist() == noise.tolist()
    assert abs(noise.mean() - np.euler_gamma) < 0.03
    assert abs(noise.std() - math.pi / math.sqrt(6)) < 0.03
    for other in (gumbel(9, 4, tokens), gumbel(10, 3, tokens), gumbel(-9, 3, tokens)):
        assert abs(np.corrcoef(noise, other)[0, 1]) < 0.03
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.03


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}, {"top_k": 500}, {"min_p": 1e-4}])
def test_rounding_differences_between_batches_do_not_change_what_is_drawn(limits):
    """Flat logits whose last bits differ, as they do from one batch to another."""
    generator = torch.Generator().manual_seed(1)
    logits = 1.5 * torch.randn(200, 8192, generator=generator)
    noisy = logits + 5e-6 * torch.randn(logits.shape, generator=generator)
    rows = [row(seed=seed, temperature=1.0, **limits) for seed in range(len(logits))]
    first, second = sample(logits, rows).token_ids, sample(noisy, rows).token_ids
    assert sum(a != b for a, b in zip(first, second, strict=True)) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_finite_best_has_no_token_and_hurts_no_other(temperature, value):
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(2))
    good = sample(logits.clone(), [row(seed=i, temperature=temperature) for i in range(3)]).token_ids
    logits[1, slice(None) if value == -math.inf else 7] = value
    rows = [row(seed=i, temperature=temperature, want_logprob=True, top_logprobs_num=2) for i in range(3)]
    found = sample(logits, rows)
    assert found.token_ids == [good[0], NO_TOKEN, good[2]]
    assert found.logprobs[1] is None
    assert found.logprobs[0] is not None


def test_greedy_is_the_maximum():
    logits = torch.randn(50, 200, generator=torch.Generator().manual_seed(0))
    want = logits.argmax(-1).tolist()
    assert sample(logits.clone(), [row(temperature=0.0) for _ in range(50)]).token_ids == want
    assert sample(logits.clone(), [row(top_k=1, temperature=2.0) for _ in range(50)]).token_ids == want
    tiny = [row(seed=i, temperature=1e-7) for i in range(50)]
    assert sample(logits.clone(), tiny).token_ids == want


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -30.0])
    want = (logits / temperature).softmax(-1).numpy()
    assert np.abs(frequencies(logits, temperature=temperature) - want).max() < 0.03


def test_frequencies_after_top_k_and_top_p():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    want = logits[[0, 1, 4]].softmax(-1).numpy()
    got = frequencies(logits, top_k=3)
    assert np.abs(got[[0, 1, 4]] - want).max() < 0.03
    assert got[[2, 3]].sum() == 0
    pair = logits[[0, 1]].softmax(-1).numpy()
    assert np.abs(frequencies(logits, top_p=0.7)[[0, 1]] - pair).max() < 0.03  # 0.56, 0.21, 0.12, ...


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([2, 7, 40]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 1000]),
    top_p=st.sampled_from([0.01, 0.3, 0.8, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_only_the_naive_support_is_drawn(seed, size, top_k, top_p, min_p):
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2
    support = naive_support(logits.double().numpy(), top_k, top_p, min_p)
    drawn = frequencies(logits, n=600, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(np.flatnonzero(drawn).tolist()) <= support
    weights = {i: math.exp(float(logits[i])) for i in support}
    likely = {i for i in support if weights[i] / sum(weights.values()) > 0.05}
    assert likely <= set(np.flatnonzero(drawn).tolist())


def test_wide_nucleus_falls_back_to_all_tokens():
    """A flat distribution over more tokens than the candidates: top-p needs tokens that are not among them."""
    vocab = 4 * CANDIDATES
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(2)) * 0.01
    order = logits.argsort(descending=True).tolist()
    rank = {token: i for i, token in enumerate(order)}
    rows = [row(seed=seed, top_p=0.9) for seed in range(300)]
    ranks = [rank[i] for i in sample(logits.expand(300, -1).clone(), rows).token_ids]
    assert max(ranks) < 0.91 * vocab
    assert max(ranks) > CANDIDATES
    limited = [row(seed=seed, top_k=2 * CANDIDATES) for seed in range(300)]
    ranks = [rank[i] for i in sample(logits.expand(300, -1).clone(), limited).token_ids]
    assert CANDIDATES < max(ranks) < 2 * CANDIDATES


def test_a_row_draws_the_same_in_any_batch():
    generator = torch.Generator().manual_seed(4)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_p": 0.6},
        {"top_k": 20, "top_p": 0.9},
        {"top_p": 0.999, "temperature": 3.0},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3, "history": np.arange(30, dtype=np.int32)},
        {"mask": mask_of(set(range(0, 3000, 7)), 3000)},
    ]
    logits = torch.randn(len(kinds) * 3, 3000, generator=generator)
    rows = [row(seed=i, step=i * 5, **kinds[i % len(kinds)]) for i in range(len(logits))]
    together = sample(logits.clone(), rows).token_ids
    alone = [sample(logits[i : i + 1].clone(), [rows[i]]).token_ids[0] for i in range(len(rows))]
    assert together == alone
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    shuffled = sample(logits[order].clone(), [rows[i] for i in order]).token_ids
    assert shuffled == [together[i] for i in order]


@settings(deadline=None, max_examples=40)
@given(
    vocab=st.sampled_from([5, 32, 33, 100]),
    data=st.data(),
    params=st.sampled_from([{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.3}]),
)
def test_masks_are_never_violated(vocab, data, params):
    allowed = data.draw(st.sets(st.integers(0, vocab - 1), min_size=1))
    forbidden = data.draw(st.sets(st.integers(0, vocab - 1)))
    if allowed <= forbidden:
        forbidden = set()
    mask = mask_of(allowed, vocab)
    rows = [row(seed=i, mask=mask, forbidden=sorted(forbidden), **params) for i in range(30)]
    logits = torch.randn(30, vocab, generator=torch.Generator().manual_seed(vocab))
    assert set(sample(logits, rows).token_ids) <= allowed - forbidden


def test_masks_touch_only_their_rows():
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    best = logits.argmax(-1).tolist()
    others = set(range(64)) - {best[1]}
    rows = [row(temperature=0.0), row(temperature=0.0, mask=mask_of(others, 64)), row(temperature=0.0)]
    got = sample(logits.clone(), rows).token_ids
    assert got[0] == best[0]
    assert got[2] == best[2]
    assert got[1] == logits[1].topk(2).indices[1]


def test_mask_that_is_too_short_is_an_error():
    with pytest.raises(ValueError, match="does not cover 64"):
        sample(torch.zeros(1, 64), [row(mask=np.full(1, -1, np.int32))])


def test_logit_bias_moves_the_maximum():
    logits = torch.zeros(1, 10)
    assert sample(logits.clone(), [row(temperature=0.0, logit_bias={7: 1.0, 2: -5.0})]).token_ids == [7]
    banned = dict.fromkeys(range(9), -100.0)
    assert frequencies(torch.zeros(10), n=200, logit_bias=banned)[9] == 1


@settings(deadline=None, max_examples=40)
@given(
    history=st.lists(st.integers(0, 19), min_size=1, max_size=30),
    cut=st.integers(0, 30),
    repetition=st.sampled_from([1.0, 1.2, 2.0, 0.8]),
    frequency=st.sampled_from([0.0, 0.5, -0.3]),
    presence=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 1000),
)
def test_penalties_follow_the_formula(history, cut, repetition, frequency, presence, seed):
    start = min(cut, len(history))
    logits = torch.randn(20, generator=torch.Generator().manual_seed(seed)) * 3
    want = logits.clone()
    for token in set(history):
        want[token] = want[token] / repetition if want[token] > 0 else want[token] * repetition
    for token in set(history[start:]):
        want[token] -= frequency * history[start:].count(token) + presence
    params = {
        "repetition_penalty": repetition,
        "frequency_penalty": frequency,
        "presence_penalty": presence,
        "history": np.array(history, np.int32),
        "output_start": start,
    }
    adjusted = logits[None].clone()
    assert sample(adjusted, [row(temperature=0.0, **params)]).token_ids == [int(want.argmax())]
    torch.testing.assert_close(adjusted[0], want)


def test_logprobs_are_the_models_own():
    """Whatever mask, temperature or penalty chose the token."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(4, 100, generator=generator) * 2
    rows = [
        row(temperature=0.0, want_logprob=True, top_logprobs_num=3),
        row(seed=1, temperature=2.0, mask=mask_of({5, 50}, 100), want_logprob=True),
        row(seed=2, top_logprobs_num=5, logit_bias={3: 50.0}),
        row(seed=3),
    ]
    got = sample(logits.clone(), rows)
    want = logits.log_softmax(-1)
    assert got.logprobs[0] == pytest.approx(float(want[0, got.token_ids[0]]), abs=1e-5)
    assert got.logprobs[1] == pytest.approx(float(want[1, got.token_ids[1]]), abs=1e-5)
    assert got.logprobs[2:] == [None, None]
    assert got.token_ids[2] == 3
    assert got.top[1] is None
    assert got.top[3] is None
    for i, n in ((0, 3), (2, 5)):
        best = want[i].topk(n)
        assert [token for token, _ in got.top[i]] == best.indices.tolist()
        assert [value for _, value in got.top[i]] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_token_logprobs_of_impossible_tokens():
    logits = torch.tensor([[0.0, -math.inf, 1.0]])
    values, top = token_logprobs(logits, [1], 0)
    assert values == [-math.inf]
    assert top == [[]]
    assert len(token_logprobs(logits, [0], 10)[1][0]) == 3
