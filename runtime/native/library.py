"""The best kernels that this machine can compile and run."""

from __future__ import annotations

import logging
import os

from trellis.runtime.native.abi import Library, load_library
from trellis.runtime.native.build import KernelsUnavailable, build
from trellis.runtime.native.isa import InstructionSet, available

logger = logging.getLogger(__name__)

ISA_VARIABLE = "TRELLIS_ISA"  # the environment's: the one instruction set to use


def best_library(isas: tuple[InstructionSet, ...] | None = None) -> Library:
    """For the best of these instruction sets (default: ``wanted()``) that the compiler knows and the system allows.

    Raises KernelsUnavailable, with the reason of the first.
    """
    first: KernelsUnavailable | None = None
    for isa in wanted() if isas is None else isas:
        try:
            library = load_library(build(isa), isa.name)
        except KernelsUnavailable as error:
            first = first or error
            logger.debug("no kernels for %s: %s", isa.name, error)
            continue
        try:
            start(library)
        except KernelsUnavailable as error:
            first = first or error
            logger.warning("%s", error)
            continue
        return library
    raise first or KernelsUnavailable("there are no kernels for this machine")


def wanted() -> tuple[InstructionSet, ...]:
    """What this machine has, best first, or the one of it that $TRELLIS_ISA names. Raises KernelsUnavailable."""
    here, name = available(), os.environ.get(ISA_VARIABLE)
    chosen = tuple(isa for isa in here if isa.name == name) if name else here
    if not chosen:
        known = ", ".join(isa.name for isa in here)
        raise KernelsUnavailable(
            f"${ISA_VARIABLE} names the instruction set {name!r}; this machine has {known}"
        )
    return chosen


def start(library: Library) -> None:
    """Ask the system for what the library needs, and let the library check its own products: of tiles (AMX) a system may say
    no, and wrong ones must never make a text. Raises KernelsUnavailable."""
    if library.functions.trellis_start() != 0:
        reason = library.functions.trellis_reason().decode()
        raise KernelsUnavailable(f"the {library.isa} kernels cannot be used: {reason}")
