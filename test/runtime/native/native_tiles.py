"""The kernels with tiles (AMX) in plain C++: an instruction set for tests, on machines that have no tiles."""

from __future__ import annotations

import hashlib
from pathlib import Path

from trellis.runtime.native.isa import INSTRUCTION_SETS, InstructionSet, cpu_features

HEADER = Path(__file__).parent / "emulated_tiles.h"
BY_NAME = {isa.name: isa for isa in INSTRUCTION_SETS}
VECTORS = BY_NAME["avx512bf16"]

# The header's state is part of the flags, so that a change of it makes another library.
EMULATED = InstructionSet(
    "amx-emulated",
    VECTORS.needs,
    (
        *VECTORS.flags,
        f"-DTRELLIS_EMULATE_TILES=0x{hashlib.sha256(HEADER.read_bytes()).hexdigest()[:8]}",
        *("-include", str(HEADER)),
    ),
)
HAS_VECTORS = (
    VECTORS.needs <= cpu_features()
)  # what the emulation, and products of few rows, are compiled for
