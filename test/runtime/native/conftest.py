"""Each instruction set of this machine, its kernels compiled."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from trellis.runtime.models import Decoder
from trellis.runtime.native.abi import Library
from trellis.runtime.native.isa import available
from trellis.runtime.native.library import best_library

sys.path.insert(0, str(Path(__file__).parent))  # for native_models

from native_models import make_config, make_decoder
from native_tiles import EMULATED, HAS_VECTORS

ISAS = available()
SHORT = (ISAS[0], ISAS[-1])  # each costs seconds to compile when the cache is empty
ISAS += (EMULATED,) if HAS_VECTORS else ()  # test_native_amx.py is its short form


@pytest.fixture(
    scope="session",
    params=[pytest.param(isa, id=isa.name, marks=[] if isa in SHORT else pytest.mark.slow) for isa in ISAS],
)
def library(request: pytest.FixtureRequest) -> Library:
    return best_library((request.param,))


@pytest.fixture(scope="session")
def tiny_model() -> Decoder:
    return make_decoder(make_config(), torch.float32)
