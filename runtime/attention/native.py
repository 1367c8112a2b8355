"""Attention of the torch decoder by the C++ kernels: what the native step does inside, for one layer at a time."""

from __future__ import annotations

import weakref
from ctypes import byref, c_void_p

import numpy as np
import torch
from torch import Tensor

from trellis.errors import ModelLoadError
from trellis.runtime.attention.base import AttentionBackend, AttentionShape
from trellis.runtime.executor.batch import Batch
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.native import abi
from trellis.runtime.native.build import KernelsUnavailable
from trellis.runtime.native.decoder import FORMATS
from trellis.runtime.native.library import best_library


class NativeAttention(AttentionBackend):
    """Reads keys and values in place; requests that share a run of slots read it together.

    Raises ModelLoadError where the kernels cannot be had, or the pool is not on a CPU in a dtype that they read.
    """

    name = "native"

    def __init__(
        self,
        shape: AttentionShape,
        pool: KVPool,
        library: abi.Library | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__(shape, pool)
        dtype, device = pool.keys[0].dtype, pool.keys[0].device
        if dtype not in FORMATS or device.type != "cpu":
            raise ModelLoadError(
                f"attention backend 'native' reads {', '.join(map(str, FORMATS))} on a CPU, not {dtype} on {device}"
            )
        try:
            self._library = library or best_library()
        except KernelsUnavailable as error:
            raise ModelLoadError(f"attention backend 'native' cannot be used: {error}") from error
        self._team = c_void_p()
        self._library.call("trellis_new_team", threads or torch.get_num_threads(), byref(self._team))
        self._free = weakref.finalize(self, self._library.functions.trellis_free_team, self._team)
        self._format = FORMATS[dtype]
        self._lengths = self._starts = self._slots = np.empty(0, np.int32)
        self.keys_read = 0
        """Keys that the last ``read`` read; those that several requests read together count once."""

    def plan(self, batch: Batch) -> None:
        self.write_slots = batch.write_slots
        self._lengths = np.array([extent.length for extent in batch.extents], np.int32)
        self._starts = np.array([extent.start for extent in batch.extents], np.int32)
        self._slots = torch.cat([extent.slots for extent in batch.extents]).numpy().astype(np.int32)

    def store(self, k: Tensor, v: Tensor, layer: int) -> None:
        self.pool.store(layer, self.write_slots, k, v)

    def read(self, q: Tensor, layer: int) -> Tensor:
        queries = q.float().contiguous()
        out = torch.empty_like(queries)
        shape = self.shape
        struct = abi.AttentionStruct(
            extends=len(self._lengths),
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            format=self._format,
            window=shape.windows[layer] or 0,
            scale=shape.scale,
            soft_cap=shape.soft_cap or 0.0,
            lengths=self._lengths.ctypes.data,
            starts=self._starts.ctypes.data,
            slots=self._slots.ctypes.data,
            queries=queries.data_ptr(),
            keys=self.pool.keys[layer].data_ptr(),
            values=self.pool.values[layer].data_ptr(),
            out=out.data_ptr(),
        )
        self._library.call("trellis_attend", self._team, byref(struct))
        self.keys_read = struct.keys_read
        return out.to(q.dtype)
