"""From logits to tokens without leaving the device: grammar masks by row index, then a draw a row.

On CUDA tensors Triton's kernels do it where triton is installed, and torch elsewhere. Nothing here reads a value back, so
nothing waits for the device, and all of it can be captured in a graph. Penalties, biases and log-probabilities are
``trellis.runtime.executor.adjust``'s and ``sampler``'s business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trellis.runtime.executor.contract import NO_TOKEN, SampleRow
from trellis.runtime.executor.noise import GAMMA
from trellis.runtime.kernels.launch import why_not

WHOLE = 1 << 60  # a probability of 1, in the units in which shares are added


@dataclass(frozen=True)
class DeviceSampling:
    """How each row is drawn, on the device of the logits; all [N], without gaps.

    temperatures: float32, 0 for the best token. top_ks: int32; below 1 or from the size of the vocabulary on it is off, and
    1 means the best token. top_ps: float64, from 1 on it is off. min_ps: float32, 0 is off. seeds: int64, seeds modulo 2**64
    in two's complement. steps: int64, the number of output tokens so far.
    """

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    seeds: Tensor
    steps: Tensor

    @staticmethod
    def of(rows: Sequence[SampleRow], device: torch.device | str = "cpu") -> DeviceSampling:
        """What of each row this takes: not its mask, penalties or reports. For a CUDA device each tensor is a copy that waits
        for the device."""
        params = [row.params for row in rows]
        columns = (
            ([p.temperature for p in params], torch.float32),
            ([max(-1, min(p.top_k, 2**31 - 1)) for p in params], torch.int32),
            ([p.top_p for p in params], torch.float64),
            ([p.min_p for p in params], torch.float32),
            ([signed(row.seed) for row in rows], torch.int64),
            ([row.step for row in rows], torch.int64),
        )
        return DeviceSampling(
            *(torch.tensor(values, dtype=dtype, device=device) for values, dtype in columns)
        )


def signed(number: int) -> int:
    """A number modulo 2**64 as the int64 of the same bits."""
    return (number + 2**63) % 2**64 - 2**63


def mask_on_device(logits: Tensor, words: Tensor, mask_of_row: Tensor) -> None:
    """Add -inf to what the rows' masks do not allow. logits: float32 [N, vocab], changed in place. words: int32
    [M, W], W * 32 >= vocab, packed masks (bit t % 32 of word t // 32 allows token t). mask_of_row: int32 or int64 [N], which
    of the M a row has, -1 for none."""
    _check(logits)
    if words.shape[1] * 32 < logits.shape[1]:
        raise ValueError(f"masks of {words.shape[1]} words do not cover {logits.shape[1]} tokens")
    if _has_kernels(logits):
        from trellis.runtime.kernels.masks import mask_by_triton

        mask_by_triton(logits, words, mask_of_row)
    else:
        mask_by_torch(logits, words, mask_of_row)


def sample_on_device(logits: Tensor, params: DeviceSampling, out: Tensor | None = None) -> Tensor:
    """One token a row: int64 [N], in ``out`` if it is given. logits: float32 [N, vocab], as masked and adjusted; unchanged.

    Temperature, top-k, top-p of what is left, min-p, then the draw that ``trellis.runtime.executor.sampler`` makes with the
    same seed and step; two tokens that are as close as rounding may change places. Of equal logits on the border of top-k or
    top-p those with the lower ids stay. A row that has no finite best logit gets ``NO_TOKEN``.
    """
    _check(logits)
    if out is None:
        out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if _has_kernels(logits):
        from trellis.runtime.kernels.race import sample_by_triton

        sample_by_triton(logits, params, out)
    else:
        sample_by_torch(logits, params, out)
    return out


def mask_by_torch(logits: Tensor, words: Tensor, mask_of_row: Tensor) -> None:
    """``mask_on_device``, by torch operations."""
    vocab = logits.shape[1]
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    rows = words.index_select(0, mask_of_row.clamp(min=0))  # [N, W]
    allowed = ((rows[:, :, None] >> bits) & 1).flatten(1)[:, :vocab] != 0
    allowed |= (mask_of_row < 0)[:, None]
    logits += torch.zeros_like(logits).masked_fill_(~allowed, -math.inf)


def sample_by_torch(logits: Tensor, params: DeviceSampling, out: Tensor) -> None:
    """``sample_on_device``, by torch operations: sorts all rows, and so takes several times their memory."""
    best = logits.amax(-1)
    is_greedy = (params.temperatures == 0) | (params.top_ks == 1)
    temperature = params.temperatures.masked_fill(is_greedy, 1.0)
    distance = (best[:, None] - logits) / temperature[:, None]
    ordered, order = distance.sort(dim=-1, stable=True)
    stays = torch.zeros_like(distance, dtype=torch.bool).scatter_(1, order, _stay(ordered, params))
    stays &= distance <= -params.min_ps.log()[:, None]
    noise = gumbel(params.seeds, params.steps, logits.shape[1])
    heights = noise.masked_fill(is_greedy[:, None], 0.0) - distance
    winners = heights.masked_fill(~stays, -math.inf).argmax(-1)
    out.copy_(winners.masked_fill(~best.isfinite(), NO_TOKEN))


def _stay(ordered: Tensor, params: DeviceSampling) -> Tensor:
    """Which tokens top-k and then top-p of what is left let stay. ordered: distances, best first → bool [N, vocab].

    Shares are added as integers, in units of 2**-60, so that they are exact.
    """
    vocab = ordered.shape[1]
    by_rank = (params.top_ks > 0) & (params.top_ks < vocab)
    limit = torch.where(by_rank, params.top_ks, vocab)[:, None]
    stays = torch.arange(vocab, device=ordered.device) < limit
    shares = ((-ordered).log_softmax(-1).exp() * WHOLE).long() * stays
    before = shares.cumsum(-1) - shares
    mass = torch.where(by_rank, shares.sum(-1), WHOLE)
    needed = (params.top_ps * mass.double()).ceil().long().clamp(min=1)
    return stays & ((before < needed[:, None]) | (params.top_ps >= 1)[:, None])


def gumbel(seeds: Tensor, steps: Tensor, vocab: int) -> Tensor:
    """The noise of ``trellis.runtime.executor.noise`` for tokens 0 .. vocab - 1. seeds, steps: int64 [N] → float32 [N, vocab]."""
    bits = noise_bits(seeds, steps, vocab)
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
    return (-(-uniform.log()).log()).float()


def noise_bits(seeds: Tensor, steps: Tensor, vocab: int) -> Tensor:
    """64 random bits a token as int64 [N, vocab]. Products of int64 wrap around, as the generator wants."""
    gamma = signed(int(GAMMA))
    start = _mix(_mix(seeds) + steps * gamma)
    tokens = torch.arange(1, vocab + 1, device=seeds.device)
    return _mix(start[:, None] + tokens * gamma)


def _mix(x: Tensor) -> Tensor:
    """The output function of SplitMix64; see ``trellis.runtime.executor.noise.mix``."""
    x = (x ^ _shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, n: int) -> Tensor:
    """Unsigned shift to the right."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _has_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and why_not(logits.device) is None


def _check(logits: Tensor) -> None:
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be float32 [rows, vocabulary] without gaps in a row, not {logits.dtype} "
            f"{list(logits.shape)} with strides {logits.stride()}"
        )
