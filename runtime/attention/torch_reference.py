"""The reference: attention in plain torch operations, on any device. The others are tested against it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trellis.runtime.attention.base import AttentionBackend, AttentionShape
from trellis.runtime.executor.batch import Batch, Extent
from trellis.runtime.executor.kv_pool import KVPool

# Contexts of decodes are padded to a multiple of this. Two products in bfloat16 of a shape not seen before leave 1.1 MB of
# compiled kernels behind, and unpadded every step had a new one. Processor time of a step, medians of alternating runs:
# 53.1 ms before, 51.6 ms after with one request, 75.5 and 73.3 ms with eight (compiling saved, padding paid).
LENGTH_STEP = 32


@dataclass(frozen=True)
class _DecodeGroup:
    """Extends of one token each, with contexts of similar length, padded to the longest, and a little more (L).

    rows: int64 [B], their places in the batch. head_rows: int64 [B * G * L], where each head's K and V lie if the pool
    is seen as rows of one head; padded with the sink. bias: window → float32 [B, 1, 1, L], -inf where nothing is seen.
    """

    rows: Tensor
    head_rows: Tensor
    bias: dict[int | None, Tensor]


@dataclass(frozen=True)
class _Chunk:
    """An extend of several tokens. visible: window → bool [n, start + n]; None where plain causal attention over the
    chunk itself says the same."""

    extent: Extent
    visible: dict[int | None, Tensor | None]


class TorchAttention(AttentionBackend):
    """One attention call an extend; extends of a single token are padded and taken together.

    batch_decodes: False takes every extend on its own, which is the most obvious form there is.
    """

    name = "torch"

    def __init__(self, shape: AttentionShape, pool: KVPool, batch_decodes: bool = True) -> None:
        super().__init__(shape, pool)
        self.batch_decodes = batch_decodes
        self._windows = set(shape.windows)
        self._decodes: list[_DecodeGroup] = []
        self._chunks: list[_Chunk] = []

    def plan(self, batch: Batch) -> None:
        singles = [e for e in batch.extents if e.length == 1] if self.batch_decodes else []
        chunks = [e for e in batch.extents if e.length > 1 or not self.batch_decodes]
        self.write_slots = batch.write_slots
        self._decodes = [self._plan_decodes(group) for group in similar_lengths(singles)]
        self._chunks = [self._plan_chunk(extent) for extent in chunks]

    def store(self, k: Tensor, v: Tensor, layer: int) -> None:
        self.pool.store(layer, self.write_slots, k, v)

    def read(self, q: Tensor, layer: int) -> Tensor:
        out = torch.empty_like(q)
        for group in self._decodes:
            out[group.rows] = self._decode(q[group.rows], group, layer)
        for chunk in self._chunks:
            rows = slice(chunk.extent.offset, chunk.extent.offset + chunk.extent.length)
            out[rows] = self._attend_chunk(q[rows], chunk, layer)
        return out

    def _plan_chunk(self, extent: Extent) -> _Chunk:
        device = extent.slots.device
        own = torch.arange(extent.start, extent.start + extent.length, device=device)[:, None]
        others = torch.arange(extent.start + extent.length, device=device)
        visible: dict[int | None, Tensor | None] = {}
        for window in self._windows:
            whole = window is None or window >= extent.start + extent.length
            if whole and extent.start == 0 and self.shape.soft_cap is None:
                visible[window] = None
            elif window is None or whole:
                visible[window] = others <= own
            else:
                visible[window] = (others <= own) & (others > own - window)
        return _Chunk(extent, visible)

    def _attend_chunk(self, q: Tensor, chunk: _Chunk, layer: int) -> Tensor:
        """q: [n, H, D] → the same."""
        shape, slots = self.shape, chunk.extent.slots
        visible = chunk.visible[shape.windows[layer]]
        q = q.transpose(0, 1)[None]  # [1, H, n, D]
        k = self.pool.keys[layer].index_select(0, slots).transpose(0, 1)[None]  # [1, G, start + n, D]
        v = self.pool.values[layer].index_select(0, slots).transpose(0, 1)[None]
        if visible is None or shape.soft_cap is None:  # no mask is made only where there is no cap
            out = F.scaled_dot_product_attention(
                q, k, v, visible, is_causal=visible is None, scale=shape.scale, enable_gqa=True
            )
        else:
            k, v = (t.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=1) for t in (k, v))
            scores = self._capped((q @ k.transpose(-1, -2)).float() * shape.scale)
            out = scores.masked_fill(~visible, -math.inf).softmax(-1).to(q.dtype) @ v
        return out[0].transpose(0, 1)

    def _plan_decodes(self, extents: list[Extent]) -> _DecodeGroup:
        device, heads = extents[0].slots.device, self.shape.num_kv_heads
        slots = torch.nn.utils.rnn.pad_sequence([e.slots for e in extents], batch_first=True)
        slots = F.pad(slots, (0, -slots.shape[1] % LENGTH_STEP))  # [B, L]
        head_rows = slots[:, None] * heads + torch.arange(heads, device=device)[:, None]  # [B, G, L]
        length = torch.tensor([len(e.slots) for e in extents], device=device)[:, None]
        place = torch.arange(slots.shape[1], device=device)
        bias = {}
        for window in self._windows:
            hidden = place >= length
            if window is not None:
                hidden = hidden | (place < length - window)
            bias[window] = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -math.inf)[
                :, None, None
            ]
        rows = torch.tensor([e.offset for e in extents], device=device)
        return _DecodeGroup(rows, head_rows.flatten(), bias)

    def _decode(self, q: Tensor, group: _DecodeGroup, layer: int) -> Tensor:
        """q: [B, H, D] → the same. Heads that share a key head are so many queries of it: they see the same tokens.

        Products of whole groups are up to three times quicker here than the fused kernel, which is made for long
        chunks of queries.
        """
        shape, batch = self.shape, len(q)
        k, v = (
            pool[layer].view(-1, shape.head_dim).index_select(0, group.head_rows)
            for pool in (self.pool.keys, self.pool.values)
        )
        k = k.view(batch * shape.num_kv_heads, -1, shape.head_dim)  # [B * G, L, D]
        scores = torch.bmm(q.reshape(len(k), -1, shape.head_dim), k.transpose(1, 2))  # [B * G, H / G, L]
        scores = self._capped(scores.float() * shape.scale).view(batch, shape.num_kv_heads, -1, k.shape[1])
        weights = (scores + group.bias[shape.windows[layer]]).softmax(-1).to(q.dtype)
        return torch.bmm(weights.view(len(k), -1, k.shape[1]), v.view(k.shape)).view(q.shape)

    def _capped(self, scores: Tensor) -> Tensor:
        cap = self.shape.soft_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)


def similar_lengths(extents: list[Extent]) -> list[list[Extent]]:
    """Groups whose longest context is less than twice the shortest, so that padding at most doubles the work."""
    groups: list[list[Extent]] = []
    for extent in sorted(extents, key=lambda e: len(e.slots)):
        if groups and len(extent.slots) < 2 * max(64, len(groups[-1][0].slots)):
            groups[-1].append(extent)
        else:
            groups.append([extent])
    return groups
