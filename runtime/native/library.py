"""The best kernels that this machine can compile and run."""

from __future__ import annotations

import logging

from trellis.runtime.native.abi import Library, load_library
from trellis.runtime.native.build import KernelsUnavailable, build
from trellis.runtime.native.isa import InstructionSet, available

logger = logging.getLogger(__name__)


def best_library(isas: tuple[InstructionSet, ...] | None = None) -> Library:
    """For the best of these instruction sets (default: all that this machine has) that the compiler knows.

    Raises KernelsUnavailable, with the reason of the first.
    """
    first: KernelsUnavailable | None = None
    for isa in available() if isas is None else isas:
        try:
            return load_library(build(isa), isa.name)
        except KernelsUnavailable as error:
            first = first or error
            logger.debug("no kernels for %s: %s", isa.name, error)
    raise first or KernelsUnavailable("there are no kernels for this machine")
