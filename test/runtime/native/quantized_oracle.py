"""Products with quantised weights: through the library, and by their definition in numpy."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import byref, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trellis.runtime.native import abi
from trellis.runtime.native.abi import Library, ProductStruct

GROUP = 32

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Product:
    """out: float32 [rows, outputs]. weights: float32 [outputs, inputs], as the library keeps them."""

    out: Floats
    weights: Floats


def multiply(
    library: Library,
    kept: str,
    source: int,
    weights: npt.NDArray[Any],
    inputs: int,
    x: Floats,
    threads: int = 2,
) -> Product:
    """weights: [outputs, ...], of the kind that ``source`` says. x: [rows, inputs]."""
    team = c_void_p()
    library.call("trellis_new_team", threads, byref(team))
    weights, x = np.ascontiguousarray(weights), np.ascontiguousarray(x, np.float32)
    out = np.full((len(x), len(weights)), np.nan, np.float32)
    unpacked = np.full((len(weights), inputs), np.nan, np.float32)
    struct = ProductStruct(
        outputs=len(weights),
        inputs=inputs,
        rows=len(x),
        kept=abi.KEPT.index(kept),
        source=source,
        weights=weights.ctypes.data,
        x=x.ctypes.data,
        out=out.ctypes.data,
        unpacked=unpacked.ctypes.data,
    )
    free = weakref.finalize(struct, library.functions.trellis_free_team, team)
    library.call("trellis_multiply", team, ctypes.byref(struct))
    free()
    return Product(out, unpacked)


def rounded_activations(x: Floats) -> Floats:
    """x as products read it: integers up to 127 times the scale of each group of 32."""
    rows, inputs = x.shape
    groups = np.pad(x, ((0, 0), (0, -inputs % GROUP))).reshape(rows, -1, GROUP)
    most = np.abs(groups).max(-1, keepdims=True)
    inverse = np.where(most > 1e-30, np.float32(127) / np.maximum(most, np.float32(1e-30)), np.float32(0))
    integers = np.rint(groups * inverse.astype(np.float32))
    rounded: Floats = (integers * (most / np.float32(127))).reshape(rows, -1)[:, :inputs]
    return rounded
