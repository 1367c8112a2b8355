"""A device without a device: a CPU that behaves like one stream of work, with graphs that replay what torch was told to do.

A recorded graph holds the operations themselves and the tensors that they had, as a graph of a device does: nothing of the
Python that told them runs again. Reading a value back, or making a tensor out of Python numbers, is an error while one is
recorded, as on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from native_models import make_config, make_decoder
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trellis.runtime.attention.base import AttentionBackend, AttentionShape
from trellis.runtime.executor.batch import Batch
from trellis.runtime.executor.contract import Extend
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.models import ModelConfig
from trellis.runtime.models.decoder import Decoder

FORBIDDEN = ("_local_scalar_dense", "lift_fresh", "item")  # they need the host


class Recorder(TorchDispatchMode):
    """Runs operations and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in func.name() for name in FORBIDDEN):
            raise RuntimeError(f"{func.name()} is not permitted when a stream is capturing")
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.operations:
            new = func(*args, **kwargs)
            given = {_memory(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)}
            for old, made in zip(tree_iter(out), tree_iter(new), strict=True):
                if isinstance(old, Tensor) and _memory(old) not in given:
                    old.copy_(made)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class FakeDevice:
    """Implements ``trellis.runtime.cuda.device.Device``.

    total, used, peak: bytes that it says it has, has given away, and ``peak_of`` tells after having done the work. log: what was
    done, in order. fail_capture: of the n-th graph, from 1. broken: ``check`` raises. tape: False replays by calling the body
    again, for kernels that torch does not see.
    """

    name = "a fake"

    def __init__(
        self,
        total: int = 1 << 30,
        used: int = 0,
        peak: int = 0,
        fail_capture: int = 0,
        tape: bool = True,
    ) -> None:
        self.where = torch.device("cpu")
        self.total, self.used, self.peak = total, used, peak
        self.fail_capture, self.broken, self.tape = fail_capture, False, tape
        self.log: list[str] = []
        self.replays = 0
        self.waiting = 0

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        self.log.append("pinned")
        return torch.full((count,), 77, dtype=dtype)  # whatever is not written must not matter

    def mark(self) -> FakeMark:
        self.log.append("mark")
        return FakeMark(self)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        self.log.append("capture")
        if self.log.count("capture") == self.fail_capture:
            raise torch.OutOfMemoryError("out of memory while capturing")
        body()
        recorder = Recorder()
        with recorder:
            body()

        def replay() -> None:
            self.replays += 1
            recorder.replay() if self.tape else body()

        return replay

    def total_memory(self) -> int:
        return self.total

    def used_memory(self) -> int:
        return self.used

    def peak_of(self, work: Callable[[], None]) -> int:
        work()
        return self.peak

    def give_back(self) -> None:
        self.log.append("give back")

    def check(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    @contextmanager
    def waiting_allowed(self):
        self.waiting += 1
        yield
        self.waiting -= 1


class FakeMark:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def wait(self) -> None:
        assert self.device.waiting, "a wait without a name"
        self.device.log.append("wait")


class FixedAttention(AttentionBackend):
    """Decodes over contexts of at most ``longest`` tokens, whatever their lengths are: all it launches depends on the number of
    requests alone. Extends of several tokens one by one. No windows, no cap."""

    name = "fixed"
    no_graphs = None
    longest = 64

    def plan(self, batch: Batch) -> None:
        self.batch = batch
        self.write_slots = batch.write_slots

    plan_graph = plan

    def store(self, k: Tensor, v: Tensor, layer: int) -> None:
        self.pool.store(layer, self.write_slots, k, v)

    def read(self, q: Tensor, layer: int) -> Tensor:
        batch = self.batch
        ends = batch.slot_starts[1:].long()
        lengths = ends - batch.slot_starts[:-1].long()
        if len(q) != len(batch):  # the extends' tokens become as many decodes, each with what it may see
            counts = torch.from_numpy(batch.flat.lengths.astype(np.int64))
            ends = ends.repeat_interleave(counts) - counts.repeat_interleave(counts)
            ends += torch.cat([torch.arange(1, n + 1) for n in counts.tolist()])
            lengths = batch.positions + 1
        place = torch.arange(self.longest)
        where = (ends[:, None] - lengths[:, None] + place).clamp(max=len(batch.slots) - 1)  # [T, L]
        slots = batch.slots.index_select(0, where.flatten())
        heads = self.shape.num_heads // self.shape.num_kv_heads
        k, v = (
            pool[layer].index_select(0, slots).unflatten(0, where.shape).repeat_interleave(heads, 2)
            for pool in (self.pool.keys, self.pool.values)
        )  # [T, L, H, D]
        scores = (q[:, None] * k).sum(-1) * self.shape.scale  # [T, L, H]
        hidden = (place >= lengths[:, None])[:, :, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(1)
        return (weights[:, :, :, None] * v).sum(1)


def fixed_attention(config: ModelConfig, pool: KVPool, kind: type = FixedAttention) -> AttentionBackend:
    return kind(AttentionShape.of(config), pool)


def make_model(vocab: int = 80, seed: int = 0, layers: int = 3) -> Decoder:
    config = make_config(head_dim=16, hidden=32, intermediate=48, vocab=vocab, windows=(None,) * layers)
    return make_decoder(config, torch.float32, seed)


def extend(tokens, start: int, slots, logits_from: int | None = None, follows: int = -1) -> Extend:
    tokens = np.array(tokens, np.int32)
    wanted = len(tokens) - 1 if logits_from is None else logits_from
    return Extend(tokens, start, np.array(slots, np.int32), wanted, follows)
