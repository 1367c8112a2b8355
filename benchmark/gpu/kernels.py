"""Every backend of the attention, the operations and the sampler, on the device, against the reference in torch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmark.gpu.report import Report
from trellis.errors import ModelLoadError
from trellis.runtime.attention import AttentionShape, create_attention
from trellis.runtime.attention.torch_reference import TorchAttention
from trellis.runtime.executor.batch import pack
from trellis.runtime.executor.contract import Extend, SampleRow
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.executor.sampler import sample
from trellis.runtime.kernels.launch import why_not
from trellis.runtime.kernels.sampling import DeviceSampling, sample_on_device
from trellis.runtime.messages import SamplingParams
from trellis.runtime.models.config import ModelConfig
from trellis.runtime.models.ops import DecoderOps, TorchOps
from trellis.runtime.models.rotary import rotary_frequencies, rotary_of

SECTION = "kernels"
BACKENDS = ("triton", "flashinfer")
# Of values about 1; larger ones may be as much further off as they are larger.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SLOTS = 4096


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    soft_cap: float | None = None

    @property
    def name(self) -> str:
        extra = "" if self.window is None else f", window {self.window}"
        extra += "" if self.soft_cap is None else f", soft cap {self.soft_cap:g}"
        return f"{self.heads} heads of {self.head_dim}, {self.kv_heads} of K/V{extra}"

    def config(self) -> ModelConfig:
        from benchmark.gpu.models import shaped

        hidden = self.heads * self.head_dim
        return replace(shaped(64, hidden, 64, 1, self.heads, self.kv_heads, 4096), head_dim=self.head_dim)


CASES = (
    Case(8, 8, 64),
    Case(8, 2, 80),
    Case(6, 2, 96, window=100),
    Case(32, 8, 128),
    Case(8, 1, 128, soft_cap=30.0),
    Case(4, 2, 256, window=33, soft_cap=50.0),
)


SMALL_CASES = (Case(4, 2, 16), Case(3, 1, 8, window=9, soft_cap=5.0))

# Of each extend: tokens that are there already, and new ones. Chunks, forced runs and decodes, with and without a prefix.
MIXED = ((0, 1), (0, 130), (63, 1), (300, 7), (129, 64), (1000, 1), (517, 33))
DECODES = ((0, 1), (1, 1), (15, 1), (16, 1), (64, 1), (255, 1), (900, 1), (333, 1), (2, 1))


def check_kernels(
    report: Report, where: torch.device, dtypes: Sequence[torch.dtype], small: bool = False
) -> None:
    """small: little work, for a run without a device."""
    for backend in BACKENDS:
        for dtype in dtypes:
            check_attention(report, where, backend, dtype, small)
    why = why_not(where)
    if why is not None:
        report.skip(SECTION, "triton operations", why)
    else:
        from trellis.runtime.kernels.ops import TritonOps

        for dtype in dtypes:
            check_ops(report, where, TritonOps(), dtype, small)
    check_sampling(report, where)


def check_attention(
    report: Report, where: torch.device, backend: str, dtype: torch.dtype, small: bool
) -> None:
    for case in SMALL_CASES if small else CASES:
        name = f"{backend}, {str(dtype).removeprefix('torch.')}, {case.name}"
        try:
            errors = [
                attention_error(case, backend, dtype, where, seed, small) for seed in range(1 if small else 3)
            ]
        except (ModelLoadError, ImportError) as error:
            report.skip(SECTION, f"attention {backend}, {str(dtype).removeprefix('torch.')}", str(error))
            return
        worst = max(errors)
        report.right(SECTION, f"attention {name}", worst <= TOLERANCE[dtype], f"largest error {worst:.1e}")


def attention_error(
    case: Case, backend: str, dtype: torch.dtype, where: torch.device, seed: int, small: bool
) -> float:
    """Largest difference from the reference in float32, ÷ (1 + what it should be), over a ragged batch and over one of
    decodes only."""
    config = case.config()
    shape = replace(AttentionShape.of(config), windows=(case.window,), soft_cap=case.soft_cap)
    generator = torch.Generator(where).manual_seed(seed)
    pool = KVPool(config, SLOTS, dtype, str(where))
    for stored in (pool.keys[0], pool.values[0]):
        stored.normal_(generator=generator)
    exact = KVPool(config, SLOTS, torch.float32, str(where))
    exact.keys[0].copy_(pool.keys[0])
    exact.values[0].copy_(pool.values[0])
    tested, reference = create_attention(backend, shape, pool), TorchAttention(shape, exact)
    worst = 0.0
    for extends in ragged_batches(random.Random(seed), small):
        batch = pack(extends, where)
        count = len(batch.token_ids)

        def rows(heads: int, count: int = count) -> Tensor:
            size = (count, heads, case.head_dim)
            return torch.randn(size, dtype=dtype, device=where, generator=generator)

        q, k, v = rows(case.heads), rows(case.kv_heads), rows(case.kv_heads)
        tested.plan(batch)
        reference.plan(batch)
        got = tested.run(q, k, v, 0).float()
        want = reference.run(q.float(), k.float(), v.float(), 0)
        worst = max(worst, largest((got - want).abs() / (1 + want.abs())))
    return worst


def largest(errors: Tensor) -> float:
    """inf where one is no number: Python's ``max`` would pass over it."""
    return float(errors.nan_to_num(nan=math.inf).max())


def ragged_batches(rng: random.Random, small: bool = False) -> Iterator[list[Extend]]:
    """A mixed one, then one of decodes alone."""
    for spans in (MIXED, DECODES):
        shorter = [(start // 20, -(-length // 20)) for start, length in spans]
        yield list(_extends(rng, rng.sample(shorter if small else spans, len(spans))))


def _extends(rng: random.Random, spans: Sequence[tuple[int, int]]) -> Iterator[Extend]:
    free = list(range(1, SLOTS + 1))
    rng.shuffle(free)
    for start, length in spans:
        slots = np.array([free.pop() for _ in range(start + length)], np.int32)
        yield Extend(np.zeros(length, np.int32), start, slots, length)


def check_ops(report: Report, where: torch.device, ops: DecoderOps, dtype: torch.dtype, small: bool) -> None:
    """Sizes that are no powers of two among them."""
    name = str(dtype).removeprefix("torch.")
    generator = torch.Generator(where).manual_seed(0)

    def values(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=where, generator=generator)

    plain = TorchOps()
    for rows, hidden in ((3, 24), (1, 16)) if small else ((1, 576), (37, 4096), (5, 1000)):
        x, delta, weight = values(rows, hidden), values(rows, hidden), values(hidden)
        pairs = [(ops.norm(x, weight, 1e-5), plain.norm(x.float(), weight.float(), 1e-5))]
        pairs += zip(
            ops.add_norm(x.clone(), delta, weight, 1e-5),
            plain.add_norm((x + delta).float(), torch.zeros_like(x).float(), weight.float(), 1e-5),
            strict=True,
        )
        pairs.append((ops.gate(x.repeat(1, 2)), plain.gate(x.repeat(1, 2).float())))
        worst = max(largest((got.float() - want).abs() / (1 + want.abs().max())) for got, want in pairs)
        report.right(
            SECTION,
            f"norms and gate by {ops.name}, {name}, [{rows}, {hidden}]",
            worst <= TOLERANCE[dtype],
            f"largest error {worst:.1e}",
        )
    worst = max(rotary_error(case, ops, dtype, where, small) for case in (SMALL_CASES if small else CASES))
    report.right(
        SECTION,
        f"rotary and store by {ops.name}, {name}",
        worst <= TOLERANCE[dtype],
        f"largest error {worst:.1e}",
    )


def rotary_error(case: Case, ops: DecoderOps, dtype: torch.dtype, where: torch.device, small: bool) -> float:
    config = case.config()
    shape = AttentionShape.of(config)
    generator = torch.Generator(where).manual_seed(0)
    batch = pack(next(ragged_batches(random.Random(0), small)), where)
    size = (len(batch.token_ids), case.heads + 2 * case.kv_heads, case.head_dim)
    heads = torch.randn(size, dtype=dtype, device=where, generator=generator)
    norm = torch.rand(case.head_dim, dtype=dtype, device=where, generator=generator) + 0.5
    frequencies = rotary_frequencies(config).to(where)
    found: list[list[Tensor]] = []
    for each, kept in ((ops, dtype), (TorchOps(), torch.float32)):
        attention = TorchAttention(shape, KVPool(config, SLOTS, kept, str(where)))
        attention.plan(batch)
        rotary = rotary_of(batch.positions, frequencies, kept)
        q = each.rotate_and_store(heads.to(kept), norm.to(kept), norm.to(kept), 1e-5, rotary, attention, 0)
        found.append([q.float(), attention.pool.keys[0].float(), attention.pool.values[0].float()])
    return max(largest((a - b).abs() / (1 + b.abs().max())) for a, b in zip(*found, strict=True))


def check_sampling(report: Report, where: torch.device) -> None:
    """The device draws what the sampler of the CPU draws, from the same logits, seeds and steps."""
    generator = torch.Generator().manual_seed(0)
    kinds = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=40),
        SamplingParams(temperature=1.2, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.05, top_p=0.95),
    )
    rows = [SampleRow(i, kinds[i % len(kinds)], seed=1000 + i, step=i) for i in range(100)]
    logits = torch.randn(len(rows), 32000, generator=generator) * 3
    want = sample(logits.clone(), rows).token_ids
    params = DeviceSampling.of(rows)
    params = type(params)(**{name: tensor.to(where) for name, tensor in vars(params).items()})
    got = sample_on_device(logits.to(where), params).tolist()
    same = sum(a == b for a, b in zip(got, want, strict=True))
    # One in a hundred: log and exp of a device differ from a CPU's in the last bit, which decides where two tokens are that close.
    report.right(SECTION, "sampling, 100 rows", same >= len(rows) - 1, f"{same} of {len(rows)} draws alike")
