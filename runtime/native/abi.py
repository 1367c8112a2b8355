"""The library's functions and structs, as ``src/abi.cpp`` declares them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

from trellis.errors import CapacityError
from trellis.runtime.native.build import KernelsUnavailable

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
OUT_OF_RANGE, NO_MEMORY = 2, 3

# Parts of a step whose time is told apart, in the order of ``enum Part``.
PARTS = ("embed", "norms", "qkv", "rotary", "attention", "output", "gate_up", "down", "head", "plan")
# How a matrix is kept, in the order of ``enum Kept``: in the decoder's own format, or quantised (``src/groups.h``).
KEPT = ("own", "q8", "q4")
MATRICES = ("qkv", "output", "gate_up", "down", "head", "embedding")
VECTORS = ("attention_norm", "mlp_norm", "query_norm", "key_norm", "norm")


class DecoderStruct(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("vocab", "hidden", "intermediate", "layers", "heads", "kv_heads")),
        *((name, c_int32) for name in ("head_dim", "format", "tied", "alike")),
        *((name, c_float) for name in ("norm_eps", "scale", "soft_cap", "rotary_scale")),
        ("windows", c_void_p),
        ("frequencies", c_void_p),
    )


class StepStruct(ctypes.Structure):
    _fields_ = (
        ("extends", c_int32),
        ("pool_rows", c_int32),
        *((name, c_void_p) for name in ("lengths", "starts", "slots", "tokens", "logits_from")),
        *((name, c_void_p) for name in ("keys", "values", "hidden", "logits", "seconds")),
    )


class ProductStruct(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("outputs", "inputs", "rows", "kept", "source")),
        *((name, c_void_p) for name in ("weights", "x", "out", "unpacked")),
    )


class AttentionStruct(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("extends", "heads", "kv_heads", "head_dim", "format", "window")),
        *((name, c_float) for name in ("scale", "soft_cap")),
        *((name, c_void_p) for name in ("lengths", "starts", "slots", "queries", "keys", "values", "out")),
        ("keys_read", c_int64),
    )


@dataclass(frozen=True)
class Library:
    """A loaded library and the instruction set it was compiled for."""

    functions: ctypes.CDLL
    isa: str

    def call(self, name: str, *args: object) -> None:
        """Call a function that returns a code. Raises IndexError, CapacityError or RuntimeError with its reason."""
        code = getattr(self.functions, name)(*args)
        if code == 0:
            return
        reason = self.functions.trellis_reason().decode()
        if code == OUT_OF_RANGE:
            raise IndexError(reason)
        if code == NO_MEMORY:
            raise CapacityError(f"the CPU kernels found {reason}", status=500)
        raise RuntimeError(f"the CPU kernels failed: {reason}")


def load_library(path: Path, isa: str) -> Library:
    """Raises KernelsUnavailable when the file cannot be loaded."""
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be loaded: {error}") from error
    signatures = {
        "trellis_start": (c_int, []),
        "trellis_new_decoder": (c_int, [POINTER(DecoderStruct), c_int, POINTER(c_void_p)]),
        "trellis_free_decoder": (None, [c_void_p]),
        "trellis_put_matrix": (c_int, [c_void_p, c_int, c_int, c_void_p, c_int, c_void_p, c_int]),
        "trellis_put_vector": (c_int, [c_void_p, c_int, c_int, c_void_p]),
        "trellis_decoder_bytes": (c_uint64, [c_void_p]),
        "trellis_step": (c_int, [c_void_p, POINTER(StepStruct)]),
        "trellis_logits": (c_int, [c_void_p, c_void_p, c_int, c_void_p]),
        "trellis_new_team": (c_int, [c_int, POINTER(c_void_p)]),
        "trellis_free_team": (None, [c_void_p]),
        "trellis_multiply": (c_int, [c_void_p, POINTER(ProductStruct)]),
        "trellis_attend": (c_int, [c_void_p, POINTER(AttentionStruct)]),
        "trellis_best_tokens": (None, [c_void_p, c_int, c_int, c_void_p, c_void_p, c_void_p]),
        "trellis_reason": (c_char_p, []),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    return Library(functions, isa)
