"""Where Triton kernels can run: on a CUDA device, or in Triton's interpreter on tensors of a CPU.

Which of the two is decided once a process, when triton is first imported: ``TRITON_INTERPRET=1`` makes every kernel one
of the interpreter's (a machine without a GPU has no other way to run them, slowly).
"""

from __future__ import annotations

import importlib.util

import torch

INTERPRETED_PROCESSORS = 4  # so that work is split there as on a device
INTERPRETED_CAPABILITY = (9, 0)


def interpreted() -> bool:
    """Whether kernels of this process run in the interpreter. Imports triton."""
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    return not isinstance(tl.sum, JITFunction)  # the language's own functions: what kernels are made of


def why_not(device: torch.device) -> str | None:
    """Why kernels cannot run on tensors of this device, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if interpreted():
        return None
    if device.type == "cuda":
        return None
    return (
        f"tensors are on {device}, and triton compiles for CUDA devices; on a CPU only its interpreter runs kernels: set "
        "TRITON_INTERPRET=1 before triton is imported"
    )


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a small number for the interpreter."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; of the interpreter, that of a Hopper."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else INTERPRETED_CAPABILITY


def power_of_two(n: int) -> int:
    """The least power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()
