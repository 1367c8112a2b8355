"""Norms of heads, rotary embedding and the store of keys and values, in one kernel, against torch in double precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from trellis.runtime.kernels.rotary import rotate_and_store, to_e4m3
from trellis.runtime.models.rotary import rotary_of, rotate

COVERS = ("rotary",)
EPS = 1e-6
SLOTS = 40


@triton.jit
def convert(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, to_e4m3(tl.load(x_ptr + at, mask=at < n, other=0.0)), mask=at < n)


def as_e4m3(x: Tensor) -> Tensor:
    """Rounded, and the largest number where torch would say NaN."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def test_e4m3_is_rounded_as_torch_rounds_but_for_what_is_too_large(device):
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 .. 448
    between = (every[1:] + every[:-1]) / 2
    special = torch.tensor([0.0, -0.0, 449.0, 464.0, 1e30, float("inf"), -float("inf"), float("nan"), 1e-30])
    generator = torch.Generator().manual_seed(0)
    some = torch.randn(20_000, generator=generator) * torch.randn(20_000, generator=generator).mul(4).exp()
    x = torch.cat((every, -every, between, -between, between * 1.0001, special, some)).to(device)
    out = torch.empty(len(x), dtype=torch.uint8, device=device)
    convert[(triton.cdiv(len(x), 4096),)](x, out, len(x), BLOCK=4096)
    assert torch.equal(out, as_e4m3(x).view(torch.uint8))


def expected(
    heads: Tensor, norms: tuple[Tensor, Tensor] | None, rotary: tuple[Tensor, Tensor], kv_heads: int
):
    """Queries, keys and values, float64."""
    queries = heads.shape[1] - 2 * kv_heads
    q, k, v = heads.double().split_with_sizes((queries, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = (F.rms_norm(x, w.shape, w.double(), EPS) for x, w in zip((q, k), norms, strict=True))
    turns = (rotary[0].double(), rotary[1].double())
    return rotate(q, turns), rotate(k, turns), v


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Equal but for one rounding to the dtype, and what is lost where two large products nearly cancel."""
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=1.01 * eps, atol=2e-6 + (0.002 if eps > 0.1 else 0.0))


@pytest.mark.parametrize(
    ("queries", "kv_heads", "head_dim"),
    [(4, 4, 64), (9, 3, 80), (6, 1, 96), (32, 4, 128), (2, 1, 256)],
)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [1, 11])
def test_heads_are_normed_turned_and_stored(queries, kv_heads, head_dim, normed, tokens, device):
    check(queries, kv_heads, head_dim, normed, tokens, torch.float32, torch.float32, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_the_pool_may_be_narrower(dtype, pool_dtype, device):
    check(9, 3, 80, True, 5, dtype, pool_dtype, device)


def test_an_empty_batch_stores_nothing(device):
    check(4, 2, 64, False, 0, torch.float32, torch.float32, device)


def check(queries, kv_heads, head_dim, normed, tokens, dtype, pool_dtype, device):
    generator = torch.Generator().manual_seed(queries * head_dim + tokens)
    heads = (3 * torch.randn(tokens, queries + 2 * kv_heads, head_dim, generator=generator)).to(device, dtype)
    norms = tuple(torch.randn(head_dim, generator=generator).to(device, dtype) for _ in range(2))
    frequencies = torch.rand(head_dim // 2, generator=generator).to(device)
    rotary = rotary_of(torch.arange(tokens, device=device) * 97, frequencies, dtype)
    slots = torch.randperm(SLOTS, generator=generator)[:tokens].to(device)
    keys, values = (
        torch.full((SLOTS, kv_heads, head_dim), -1.0, device=device).to(pool_dtype) for _ in range(2)
    )
    query_norm, key_norm = norms if normed else (None, None)
    q = rotate_and_store(heads, query_norm, key_norm, EPS, rotary, slots, keys, values)
    want_q, want_k, want_v = expected(heads, norms if normed else None, rotary, kv_heads)
    assert q.dtype == dtype
    near(q, want_q, dtype)
    near(keys.float()[slots], want_k, pool_dtype)
    near(values.float()[slots], want_v, pool_dtype)
    others = torch.ones(SLOTS, dtype=torch.bool).index_fill(0, slots.cpu(), False).to(device)
    assert (keys[others].float() == -1).all()
    assert (values[others].float() == -1).all()
