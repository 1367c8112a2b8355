"""The kernels with tiles (AMX), whose instructions are emulated: all products of a decoder, and when they are refused."""

from __future__ import annotations

import ctypes
import logging
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from native_models import as_float32, make_config, make_decoder
from native_tiles import BY_NAME, EMULATED, HAS_VECTORS, VECTORS
from quantized_oracle import multiply

from trellis.runtime.executor import KVPool
from trellis.runtime.executor.contract import Extend
from trellis.runtime.executor.step import NativeStep, TorchStep
from trellis.runtime.models import Decoder
from trellis.runtime.native import library as libraries
from trellis.runtime.native.abi import Library
from trellis.runtime.native.build import SOURCES, KernelsUnavailable, build, find_compiler
from trellis.runtime.native.decoder import NativeDecoder
from trellis.runtime.native.isa import INSTRUCTION_SETS, available
from trellis.runtime.native.library import best_library
from trellis.runtime.native.quantized import Quantization

needs_vectors = pytest.mark.skipif(
    not HAS_VECTORS, reason="products of few rows are for AVX-512 with bfloat16, which this machine has not"
)
AMX = BY_NAME["amx"]
FLOATS = 0  # a source of weights
SLOTS = 256
INSTRUCTIONS = {"ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps", "tdpbsud"}
BROKEN = {
    "bfloat16": "products by tiles (AMX) of bfloat16 weights are wrong: ",
    "int8": "products by tiles (AMX) of 8-bit weights are wrong: ",
    "illegal": "tiles (AMX) are an illegal instruction here",
}


@pytest.fixture(scope="module")
def tiles() -> Library:
    return best_library((EMULATED,))


@pytest.fixture(scope="module")
def vectors() -> Library:
    return best_library((VECTORS,))


def logits(
    library: Library,
    model: Decoder,
    sizes: list[int],
    quantization: str = "none",
    deterministic: bool = False,
) -> torch.Tensor:
    """Of all tokens of prompts of these sizes, in one batch."""
    pool = KVPool(model.config, SLOTS, model.dtype)
    native = NativeDecoder(library, model, 2, Quantization(quantization), deterministic)
    return of_prompts(NativeStep(native, pool), model, sizes)


def of_prompts(step: NativeStep | TorchStep, model: Decoder, sizes: list[int]) -> torch.Tensor:
    extends, free = [], np.arange(1, SLOTS + 1, dtype=np.int32)
    for i, n in enumerate(sizes):
        tokens = np.random.default_rng(i).integers(0, model.config.vocab_size, n).astype(np.int32)
        extends.append(Extend(tokens, 0, free[:n], 0))
        free = free[n:]
    rows = step.forward(extends)
    return rows.take(range(len(rows)))


@needs_vectors
@pytest.mark.parametrize("kept", ["q8", "q4"])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 31, 33, 48, 70])
def test_integer_products_are_the_same_bits(tiles, vectors, kept, rows):
    random = np.random.default_rng(rows)
    for outputs, inputs in ((32, 32), (50, 70), (200, 256)):
        weights, x = (random.standard_normal((n, inputs), np.float32) for n in (outputs, rows))
        results = [multiply(library, kept, FLOATS, weights, inputs, x).out for library in (tiles, vectors)]
        np.testing.assert_array_equal(*results)


@needs_vectors
@pytest.mark.parametrize("sizes", [[3, 1], [9], [40, 1, 25]], ids=str)
@pytest.mark.parametrize("hidden", [128, 70])
@torch.inference_mode()
def test_bfloat16_is_no_further_from_float32_than_torch(tiles, vectors, hidden, sizes):
    """With a depth of whole tiles, and with a rest. And it is not computed by the vectors that a smaller batch has."""
    model = make_decoder(make_config(head_dim=32, hidden=hidden, intermediate=2 * hidden), torch.bfloat16)
    want, reference = (
        of_prompts(TorchStep(decoder, KVPool(decoder.config, SLOTS, decoder.dtype), "torch"), decoder, sizes)
        for decoder in (as_float32(model), model)
    )
    got = logits(tiles, model, sizes)
    assert (got - want).square().mean().sqrt() <= 1.1 * (reference - want).square().mean().sqrt()
    assert not torch.equal(got, logits(vectors, model, sizes))


@needs_vectors
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@torch.inference_mode()
def test_a_quantised_decoder_computes_the_same_bits(tiles, vectors, quantization):
    model = make_decoder(make_config(head_dim=32, hidden=128, intermediate=200), torch.float32)
    for sizes in ([5], [40, 1, 25]):
        got, want = (logits(library, model, sizes, quantization) for library in (tiles, vectors))
        assert torch.equal(got, want)


@needs_vectors
@pytest.mark.parametrize("quantization", ["none", "int8"])
@torch.inference_mode()
def test_deterministic_rows_do_not_depend_on_how_many_there_are(tiles, quantization):
    """One row is less than what is worth a tile, and 50 end within one."""
    model = make_decoder(make_config(head_dim=32, hidden=128), torch.bfloat16)
    alone = logits(tiles, model, [1], quantization, deterministic=True)
    for sizes in ([1, 3], [1, 20], [1, 49]):
        assert torch.equal(logits(tiles, model, sizes, quantization, deterministic=True)[:1], alone)


@pytest.fixture
def broken(tmp_path, monkeypatch) -> Callable[[str], None]:
    """The emulated tiles of a machine that does not do them right, from a library that has not been started yet."""

    def make(how: str) -> None:
        copy = tmp_path / "kernels.so"
        shutil.copy(build(EMULATED), copy)
        monkeypatch.setenv("EMULATED_TILES", how)
        monkeypatch.setattr(libraries, "build", lambda isa: copy if isa is EMULATED else build(isa))

    return make


@needs_vectors
@pytest.mark.parametrize("how", BROKEN)
def test_tiles_that_compute_something_else_are_refused(broken, how, caplog):
    broken(how)
    with caplog.at_level(logging.WARNING):
        assert best_library((EMULATED, VECTORS)).isa == VECTORS.name
    (record,) = caplog.records
    assert record.message.startswith(f"the amx-emulated kernels cannot be used: {BROKEN[how]}")
    with pytest.raises(KernelsUnavailable, match=re.escape(BROKEN[how])):
        best_library((EMULATED,))


ALONE = r"""
#include "amx_start.h"

extern "C" const char* start() {
    static std::string reason;
    try {
        trellis::start_tiles();
    } catch (const std::exception& error) {
        reason = error.what();
    }
    return reason.c_str();
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """The products by tiles with the real instructions, and what comes before their first use."""
    directory = tmp_path_factory.mktemp("tiles")
    source = directory / "alone.cpp"
    source.write_text(ALONE)
    made = directory / "alone.so"
    flags = ("-O1", "-std=gnu++17", "-fPIC", "-shared", "-pthread", "-I", str(SOURCES), *AMX.flags)
    done = subprocess.run(
        [*find_compiler(), *flags, "-o", str(made), str(source)], capture_output=True, text=True, check=False
    )
    if "amx" in done.stderr and "unrecognized" in done.stderr:
        pytest.skip("the compiler knows no tiles")
    assert done.returncode == 0, done.stderr
    return made


@needs_vectors
def test_tiles_are_used_where_the_system_allows_them(compiled):
    """Elsewhere no instruction of theirs is reached: it would end the process."""
    start = ctypes.CDLL(str(compiled)).start
    start.restype = ctypes.c_char_p
    reason = start().decode()
    if AMX in available():
        assert reason == ""
    else:
        assert reason.startswith("the kernel of the system does not let this process use tiles (AMX): ")
    assert start().decode() == reason


@needs_vectors
@pytest.mark.slow
def test_the_next_best_is_taken_where_it_does_not(vectors, caplog):
    with caplog.at_level(logging.WARNING):
        library = best_library((AMX, VECTORS))
    if AMX in available():
        weights, x = (np.random.default_rng(1).standard_normal((n, 256), np.float32) for n in (50, 40))
        got, want = (multiply(each, "q8", FLOATS, weights, 256, x).out for each in (library, vectors))
        assert library.isa == AMX.name
        np.testing.assert_array_equal(got, want)
    else:
        assert library.isa == VECTORS.name
        (record,) = caplog.records
        assert "the amx kernels cannot be used: the kernel of the system does not let" in record.message


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
def test_the_compiler_leaves_the_tiles_in(compiled):
    listing = subprocess.run(
        ["objdump", "--disassemble", "--no-show-raw-insn", compiled],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = set(re.findall(r"\b(?:tdp\w+|tile\w+|ldtilecfg)\s", listing))
    assert {each.strip() for each in found} == INSTRUCTIONS


@pytest.mark.usefixtures("compiled")
def test_compiles_without_warnings():
    """But for those that headers of gcc 12 give for registers that they leave undefined on purpose."""
    quiet = ("-Wall", "-Wextra", "-Werror", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
    command = [*find_compiler(), "-std=gnu++17", "-O1", "-fsyntax-only", *AMX.flags, *quiet]
    subprocess.run([*command, *map(str, SOURCES.glob("*.cpp"))], check=True)


def test_one_instruction_set_can_be_asked_for(monkeypatch):
    here = available()
    monkeypatch.setenv("TRELLIS_ISA", here[-1].name)
    assert libraries.wanted() == here[-1:]
    assert best_library().isa == "portable"
    monkeypatch.setenv("TRELLIS_ISA", "abacus")
    message = re.escape(f"$TRELLIS_ISA names the instruction set 'abacus'; this machine has {here[0].name}")
    with pytest.raises(KernelsUnavailable, match=message):
        best_library()
    monkeypatch.delenv("TRELLIS_ISA")
    assert libraries.wanted() == here


def test_tiles_come_first_where_a_machine_has_them():
    assert INSTRUCTION_SETS[0] is AMX
    assert AMX.needs > VECTORS.needs
