"""The emulated tile instructions against the manual: their results in numpy, and what they fault on."""

from __future__ import annotations

import ctypes
import platform
import signal
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from native_tiles import HEADER

from trellis.runtime.native.build import find_compiler

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the kernels have tiles on x86-64 only"
)

SOURCE = r"""
#include "emulated_tiles.h"

struct Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// 0 is c [m, n], 1 is a [m, k], 2 is b [k, n].
static Config shapes(int m, int n, int k) {
    Config c;
    const int rows[3] = {m, m, k}, words[3] = {n, k, n};
    for (int i = 0; i < 3; ++i) c.rows[i] = rows[i], c.row_bytes[i] = 4 * words[i];
    return c;
}

extern "C" void product(int integers, int m, int n, int k, const void* a, const void* b, void* c) {
    const Config config = shapes(m, n, k);
    _tile_loadconfig(&config);
    _tile_loadd(0, c, 4 * n);
    _tile_loadd(1, a, 4 * k);
    _tile_loadd(2, b, 4 * n);
    if (integers)
        _tile_dpbsud(0, 1, 2);
    else
        _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, c, 4 * n);
    _tile_release();
}

int main(int, char** arguments) {
    const int which = std::atoi(arguments[1]);
    static char memory[4096];
    Config good = shapes(5, 16, 3), bad = good;
    if (which == 0) _tile_zero(0);
    if (which == 1) bad.palette = 2;
    if (which == 2) bad.rows[0] = 17;
    if (which == 3) bad.row_bytes[0] = 68;
    if (which == 4) bad.rows[1] = 0;
    if (which == 5) bad.reserved[3] = 1;
    if (which == 6) bad.rows[8] = 1;
    if (which <= 6) _tile_loadconfig(&bad);
    _tile_loadconfig(&good);
    if (which == 7) _tile_loadd(3, memory, 64);
    if (which == 8) _tile_loadd(0, memory, 32);
    if (which == 9) _tile_stored(0, memory, 32);
    if (which == 10) _tile_dpbf16ps(0, 0, 2);
    if (which == 11) _tile_dpbsud(1, 0, 2);
    if (which == 12) _tile_dpbf16ps(2, 1, 0);
    if (which == 13) good.row_bytes[2] = 60, _tile_loadconfig(&good), _tile_dpbf16ps(0, 1, 2);
    if (which == 14) good.rows[2] = 4, _tile_loadconfig(&good), _tile_dpbsud(0, 1, 2);
    if (which == 15) good.row_bytes[0] = 62, _tile_loadconfig(&good), _tile_zero(0);
    if (which == 16) _tile_release(), _tile_loadd(0, memory, 64);
    return 0;
}
"""
FAULTS = {
    0: "before LDTILECFG",
    1: "palette that is not 1",
    2: "more than 16 rows",
    3: "more than 64 bytes a row",
    4: "bytes but no rows",
    5: "reserved bytes",
    6: "rows of a tile that there is not",
    7: "has no shape",
    8: "TILELOADD of rows that overlap",
    9: "TILESTORED of rows that overlap",
    10: "with itself",
    11: "differ in bytes a row",
    12: "differ in rows",
    13: "differ in bytes a row",
    14: "differ in depth",
    15: "not whole words",
    16: "before LDTILECFG",
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Path:
    """A program that is a library too."""
    directory = tmp_path_factory.mktemp("emulation")
    source = directory / "machine.cpp"
    source.write_text(SOURCE)
    made = directory / "machine.so"
    flags = ("-O1", "-std=gnu++17", "-fPIC", "-I", str(HEADER.parent), "-Wall", "-Wextra", "-Werror")
    for target, kind in ((made, "-shared"), (made.with_suffix(""), "-pie")):
        subprocess.run([*find_compiler(), *flags, kind, "-o", str(target), str(source)], check=True)
    return made


def product(machine: Path, integers: bool, a: npt.NDArray, b: npt.NDArray, c: npt.NDArray) -> npt.NDArray:
    """a: uint32 [m, k]. b: uint32 [k, n]. c: 32 bits [m, n]."""
    (m, k), n, out = a.shape, b.shape[1], c.copy()
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    pointers = [ctypes.c_void_p(each.ctypes.data) for each in (a, b, out)]
    ctypes.CDLL(str(machine)).product(int(integers), m, n, k, *pointers)
    return out


def halves(words: npt.NDArray) -> tuple[npt.NDArray, npt.NDArray]:
    """The even and the odd bfloat16 of words, as float32."""
    low = (words << np.uint32(16)).view(np.float32)
    return low, (words & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize("shape", [(1, 1, 1), (16, 16, 16), (5, 16, 8), (16, 7, 3)])
def test_products_of_bfloat16(machine, shape):
    """Products of two bfloat16 are exact in float32, so a fused step is a product and a sum."""
    m, n, k = shape
    random = np.random.default_rng(m)
    a, b = (random.standard_normal(s, np.float32).view(np.uint32) for s in ((m, 2 * k), (k, 2 * n)))
    a, b = a[:, ::2] >> 16 | a[:, 1::2] & 0xFFFF0000, b[:, ::2] >> 16 | b[:, 1::2] & 0xFFFF0000
    c = random.standard_normal((m, n), np.float32)
    want = c.copy()
    sums = []
    for x, y in zip(halves(a), halves(b), strict=True):
        total = np.zeros((m, n), np.float32)
        for i in range(k):
            total += x[:, i : i + 1] * y[i]
        sums.append(total)
    want += sums[0] + sums[1]
    np.testing.assert_array_equal(product(machine, False, a, b, c), want)


def test_small_numbers_are_zero(machine):
    """Of the factors, of the products and of the sums: 2^-130 times 1, 2^-70 times 2^-70, and -2^-126 + 1.5 * 2^-126."""

    def words(*values: float) -> npt.NDArray:
        return (np.array([values], np.float32).view(np.uint32) >> 16).astype(np.uint32)

    c = np.zeros((1, 1), np.float32)
    assert product(machine, False, words(2.0**-130), words(1.0), c)[0, 0] == 0
    assert product(machine, False, words(2.0**-70), words(2.0**-70), c)[0, 0] == 0
    tiny = np.full((1, 1), -(2.0**-126), np.float32)
    assert product(machine, False, words(1.0), words(1.5 * 2.0**-126), tiny)[0, 0] == 0
    assert product(machine, False, words(2.0**-60), words(2.0**-60), c)[0, 0] == np.float32(2.0**-120)


@pytest.mark.parametrize("shape", [(1, 1, 1), (16, 16, 16), (5, 16, 8)])
def test_products_of_bytes_with_and_without_sign(machine, shape):
    m, n, k = shape
    random = np.random.default_rng(m)
    a, b = (random.integers(0, 2**32, s, np.uint32) for s in ((m, k), (k, n)))
    c = random.integers(-(2**31), 2**31, (m, n)).astype(np.int32)
    signed = a.view(np.int8).reshape(m, k, 4).astype(np.int64)
    unsigned = b.view(np.uint8).reshape(k, n, 4).astype(np.int64)
    want = (c + np.einsum("mki,kni->mn", signed, unsigned)).astype(np.int32)
    np.testing.assert_array_equal(product(machine, True, a, b, c), want)


@pytest.mark.parametrize("which", FAULTS)
def test_faults_where_a_machine_does(machine, which):
    done = subprocess.run([machine.with_suffix(""), str(which)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGILL
    assert FAULTS[which] in done.stderr


def test_and_only_there(machine):
    assert subprocess.run([machine.with_suffix(""), "17"], check=False).returncode == 0
