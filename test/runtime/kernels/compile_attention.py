"""Compiles kernels of the Triton attention for GPUs that need not be there, and prints as JSON what each takes of them.

Run as a program with ``TRITON_INTERPRET=0``: python compile_attention.py CAPABILITY TYPES HEAD_DIM ...
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trellis.runtime.kernels.merge_pieces import merge_pieces
from trellis.runtime.kernels.paged_attention import attend_tiles
from trellis.runtime.kernels.tile_shapes import TileShape, block_dim, tile_shapes

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPES = {
    "bf16": (torch.bfloat16, tl.bfloat16, "bf16"),
    "fp16": (torch.float16, tl.float16, "fp16"),
    "fp8": (torch.float8_e4m3fn, tl.bfloat16, "fp8e4nv"),
    "fp32": (torch.float32, tl.float32, "fp32"),
}
"""Name → type of the pool, of products, of the pool as Triton calls it."""
ALIGNED = [["tt.divisibility", 16]]


def compiled(kernel: Any, capability: int, types: dict[str, str], constants: dict, **options: int) -> Any:
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): ALIGNED for name in types if name.endswith(("_ptr", "_stride"))}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compiled_attention(
    capability: int, name: str, head_dim: int, tile: TileShape, windowed: bool, capped: bool
) -> Any:
    _, factors, pool = TYPES[name]
    wide = {"fp8": "bf16"}.get(name, name)
    types = {
        "q_ptr": f"*{wide}",
        "k_ptr": f"*{pool}",
        "v_ptr": f"*{pool}",
        "out_ptr": f"*{wide}",
        "pieces_ptr": "*fp32",
        "levels_ptr": "*fp32",
        "items_ptr": "*i32",
        "slots_ptr": "*i32",
        "q_token_stride": "i32",
        "q_head_stride": "i32",
        "inner": "fp32",
        "outer": "fp32",
        "window": "i32",
    }
    constants = {
        "KV_HEADS": 8,
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": block_dim(head_dim),
        "HEIGHT": tile.height,
        "BLOCK_KEYS": tile.keys,
        "CAPPED": capped,
        "WINDOWED": windowed,
        "WHOLE": tile.whole,
        "PRECISION": "tf32x3",
        "FACTORS": factors,
    }
    return compiled(attend_tiles, capability, types, constants, num_warps=tile.warps, num_stages=tile.stages)


def compiled_merge(capability: int, head_dim: int) -> Any:
    types = {"out_ptr": "*bf16", "pieces_ptr": "*fp32", "levels_ptr": "*fp32", "merges_ptr": "*i32"}
    constants = {
        "KV_HEADS": 8,
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": block_dim(head_dim),
        "HEIGHT": 16,
        "BLOCK_PIECES": 16,
    }
    return compiled(merge_pieces, capability, types, constants, num_warps=4)


def resources(kernel: Any) -> dict[str, int]:
    """registers of a thread; stack, local: bytes of memory that it uses beside them; shared: bytes of a program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", report)[1]) for name in ("REG", "STACK", "LOCAL"))  # type: ignore[index]  # fmt: skip
    return {"registers": registers, "stack": stack, "local": local, "shared": kernel.metadata.shared}


def every(capability: int, names: list[str], head_dims: list[int], variants: bool) -> Iterator[dict]:
    """variants: also with a window and a cap."""
    version = (capability // 10, capability % 10)
    for head_dim in head_dims:
        yield {"kernel": "merge", "head_dim": head_dim, **resources(compiled_merge(capability, head_dim))}
        for name in names:
            for tile in tile_shapes(head_dim, TYPES[name][0], version):
                for more in (False, True)[: 1 + variants]:
                    kernel = compiled_attention(capability, name, head_dim, tile, more, more)
                    yield {
                        "kernel": "attend",
                        "type": name,
                        "head_dim": head_dim,
                        "height": tile.height,
                        "variant": more,
                        "wgmma": "wgmma" in kernel.asm["ptx"],
                        "async_copies": kernel.asm["ptx"].count("cp.async.cg.shared.global"),
                        **resources(kernel),
                    }


if __name__ == "__main__":
    capability, names, variants, *head_dims = sys.argv[1:]
    for found in every(int(capability), names.split(","), [int(dim) for dim in head_dims], variants == "all"):
        print(json.dumps(found), flush=True)
