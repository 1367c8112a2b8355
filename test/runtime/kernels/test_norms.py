"""RMSNorm and the gate against the same in double precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trellis.runtime.kernels.activation import gate
from trellis.runtime.kernels.norms import add_norm, norm

COVERS = ("norms", "activation")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Equal but for one rounding to the dtype. The interpreter cuts bfloat16 off, so that it is one unit in the last place."""
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps * 1.01, atol=1e-6)


def random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def norm_in_double(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.double(), weight.shape, weight.double(), EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 577), (3, 4, 80), (2, 4096), (0, 32)])
def test_norm(shape, dtype, device):
    x, weight = 3 * random(shape, dtype, device), random(shape[-1:], dtype, device, 1)
    near(norm(x, weight, EPS), norm_in_double(x, weight), dtype)


def test_norm_reads_rows_with_gaps(device):
    x, weight = random((6, 100), torch.float32, device), random((48,), torch.float32, device, 1)
    near(norm(x[::2, 7:55], weight, EPS), norm_in_double(x[::2, 7:55], weight), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 577), (2, 1536)])
def test_add_norm_norms_what_it_keeps(shape, dtype, device):
    x, delta = random(shape, dtype, device), random(shape, dtype, device, 1)
    weight = random(shape[-1:], dtype, device, 2)
    total = x.double() + delta.double()
    added, normed = add_norm(x, delta, weight, EPS)
    near(added, total, dtype)
    near(normed, norm_in_double(added, weight), dtype)
    assert added.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 3), (5, 1024), (2, 2500)])
def test_gate(rows, width, dtype, device):
    gate_up = 4 * random((rows, 2 * width), dtype, device)
    gate_up[0, 0], gate_up[0, 1] = -200.0, 200.0  # exp overflows
    first, second = gate_up.double().chunk(2, -1)
    near(gate(gate_up), F.silu(first) * second, dtype)
