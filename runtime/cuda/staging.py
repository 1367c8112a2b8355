"""What a step needs on the device, in one copy: all its integers lie in one pinned buffer, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trellis.runtime.cuda.device import Device
from trellis.runtime.executor.batch import WIDE, Arrays, Batch, FlatBatch, arrange, flatten
from trellis.runtime.executor.contract import NO_PLACE, Extend, IntArray

# Each part begins at a multiple of so many integers (256 bytes): kernels are compiled anew for pointers that are aligned
# otherwise, and this is what an allocation of its own would have.
ALIGNMENT = 64


@dataclass(frozen=True)
class Staged:
    """A batch on the device. follows: int64 [T], where in the table of sampled tokens each token stands, or ``NO_PLACE``; None
    if all tokens are known."""

    batch: Batch
    follows: Tensor | None


@dataclass(frozen=True)
class Parts:
    """The integers of a batch on the host, in the order in which they lie in the buffer: those that become int64 first."""

    flat: FlatBatch
    arrays: Arrays
    follows: IntArray

    @staticmethod
    def of(extends: Sequence[Extend]) -> Parts:
        flat = flatten(extends)
        arrays = arrange(flat)
        follows = np.full(len(flat.token_ids), NO_PLACE, np.int32)
        follows[arrays.query_starts[:-1]] = [extend.follows for extend in extends]
        return Parts(flat, arrays, follows)

    @property
    def wide(self) -> tuple[IntArray, ...]:
        return (*self.arrays[:WIDE], self.follows)

    @property
    def narrow(self) -> tuple[IntArray, ...]:
        return self.arrays[WIDE:]


class Staging:
    """Copies batches to the device; the copies are launched, not waited for."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def batch(self, extends: Sequence[Extend]) -> Staged:
        """Raises ValueError as ``flatten`` does."""
        parts = Parts.of(extends)
        arrays = (*parts.wide, *parts.narrow)
        places = layout([len(array) for array in arrays])
        sent = self.send(arrays, places)
        border = places[len(parts.wide)].start
        wide = sent[:border].long()
        *first, follows = (wide[place] for place in places[: len(parts.wide)])
        batch = Batch(parts.flat, *first, *(sent[place] for place in places[len(parts.wide) :]))
        return Staged(batch, follows if (parts.follows != NO_PLACE).any() else None)

    def send(self, arrays: Sequence[IntArray], places: Sequence[slice], into: Tensor | None = None) -> Tensor:
        """The arrays at their places in an int32 buffer on the device: ``into``, or a new one."""
        size = places[-1].stop
        host = self._device.pinned(size, torch.int32)
        view = host.numpy()
        for array, place in zip(arrays, places, strict=True):
            view[place] = array
        if into is None:
            into = torch.empty(size, dtype=torch.int32, device=self._device.where)
        into[:size].copy_(host, non_blocking=True)
        return into


def send_together(tensors: Sequence[Tensor], device: Device) -> list[Tensor]:
    """Copies on the device of tensors of any types, which are on the host, in one copy."""
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    places = [
        slice(4 * place.start, 4 * place.start + len(part))
        for place, part in zip(layout([-(-len(part) // 4) for part in flat]), flat, strict=True)
    ]
    host = device.pinned(places[-1].stop, torch.uint8)
    for part, place in zip(flat, places, strict=True):
        host[place] = part
    sent = torch.empty(len(host), dtype=torch.uint8, device=device.where)
    sent.copy_(host, non_blocking=True)
    return [
        sent[place].view(tensor.dtype).view(tensor.shape)
        for tensor, place in zip(tensors, places, strict=True)
    ]


def layout(lengths: Sequence[int]) -> list[slice]:
    """Where parts of these lengths lie in a buffer, each aligned; the buffer ends with the last of them."""
    places, at = [], 0
    for length in lengths:
        places.append(slice(at, at + length))
        at += -(-length // ALIGNMENT) * ALIGNMENT
    return places
