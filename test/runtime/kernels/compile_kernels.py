"""Compiles the kernels beside attention for GPUs that need not be there, and prints as JSON what each takes of them.

Run as a program with ``TRITON_INTERPRET=0``: python compile_kernels.py CAPABILITY DTYPE ...; a single
dtype is the short form. The functions that launch kernels
are called as ever, with tensors of a CPU; a launch compiles what it would launch, for the same arguments, and ends there.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from compile_attention import resources
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from trellis.runtime.kernels.activation import gate
from trellis.runtime.kernels.masks import mask_by_triton
from trellis.runtime.kernels.norms import add_norm, norm
from trellis.runtime.kernels.race import sample_by_triton
from trellis.runtime.kernels.rotary import rotate_and_store
from trellis.runtime.kernels.sampling import DeviceSampling

EPS = 1e-5
VOCABULARIES = (128_256, 49_152, 151_936)


class NoDevice:
    """What a launch asks its device for before there is anything to launch."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        return 0


def report_launches(capability: int) -> None:
    """From now on a launch compiles, and prints what came out."""
    driver.set_active(NoDevice(capability))
    run = JITFunction.run

    def compile_and_print(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:  # noqa: ARG001
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found = {"kernel": self.__name__, "warps": kernel.metadata.num_warps}
        print(json.dumps({**found, **resources(kernel)}), flush=True)
        return kernel

    JITFunction.run = compile_and_print


def launch_decoder(dtype: torch.dtype, hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> None:
    x = torch.zeros((4, hidden), dtype=dtype)
    norm(x, x[0], EPS)
    add_norm(x, x, x[0], EPS)
    gate(torch.zeros((4, 2 * inner), dtype=dtype))
    every = torch.zeros((4, heads + 2 * kv_heads, dim), dtype=dtype)
    slots = torch.zeros(4, dtype=torch.int64)
    for stored in dict.fromkeys((dtype, torch.float8_e4m3fn)):
        pool = torch.zeros((9, kv_heads, dim)).to(stored)
        for weight in (None, every[0, 0]):
            rotate_and_store(every, weight, weight, EPS, (every[:, :1], every[:, :1]), slots, pool, pool)


def launch_sampling(vocab: int) -> None:
    logits, column = torch.zeros((4, vocab)), torch.zeros(4)
    masks = torch.zeros((2, (vocab + 31) // 32), dtype=torch.int32)
    mask_by_triton(logits, masks, column.int())
    params = DeviceSampling(column, column.int(), column.double(), column, column.long(), column.long())
    sample_by_triton(logits, params, column.long())


if __name__ == "__main__":
    capability, *names = sys.argv[1:]
    shapes = (4096, 14336, 32, 8, 128), (576, 1536, 9, 3, 64)
    is_short = len(names) == 1
    report_launches(int(capability))
    for name in names:
        for shape in shapes[: 1 if is_short else None]:
            launch_decoder(getattr(torch, name), *shape)
    for vocab in VOCABULARIES[: 1 if is_short else None]:
        launch_sampling(vocab)
