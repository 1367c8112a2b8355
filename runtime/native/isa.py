"""Instruction sets that the kernels are compiled for, and which of them this machine has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class InstructionSet:
    """needs: features as the Linux kernel names them. flags: what the compiler is told."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"})
AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")

BF16 = AVX512 | {"avx512_bf16", "avx512_vnni"}
BF16_FLAGS = (*AVX512_FLAGS, "-mavx512bf16", "-mavx512vnni")

# Best first.
INSTRUCTION_SETS = (
    InstructionSet(
        "amx",
        BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
        (*BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    InstructionSet("avx512bf16", BF16, BF16_FLAGS),
    InstructionSet("avx512vnni", AVX512 | {"avx512_vnni"}, (*AVX512_FLAGS, "-mavx512vnni")),
    InstructionSet("avx512", AVX512, AVX512_FLAGS),
    InstructionSet("avx2", frozenset({"avx2", "fma", "f16c"}), ("-mavx2", "-mfma", "-mf16c")),
    InstructionSet(
        "neon-bf16", frozenset({"asimd", "asimddp", "bf16", "i8mm"}), ("-march=armv8.2-a+dotprod+bf16+i8mm",)
    ),
    InstructionSet("portable", frozenset(), ()),
)


def available() -> tuple[InstructionSet, ...]:
    """What this machine can run, best first. The last is ``portable``: vectors of 128 bits, on any processor."""
    features = cpu_features()
    return tuple(each for each in INSTRUCTION_SETS if each.needs <= features)


def cpu_features() -> frozenset[str]:
    """The processor's features by the Linux kernel's names; none where there is no /proc."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(features.split())
