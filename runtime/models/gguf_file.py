"""Reading GGUF files: metadata and tensors, mapped into memory.

The `gguf` package's own reader builds an array object for every string of the vocabulary, which takes seconds;
this one reads the same layout in a tenth of a second. Block formats are still undone by that package
(``runtime/models/weights.py``). Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trellis.errors import ModelLoadError

MAGIC = b"GGUF"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

# Number of a type → (values of a block, bytes of a block), for the common ones; to ask the `gguf` package is to load it.
BLOCK_SIZES = {
    0: (1, 4),  # float32
    1: (1, 2),  # float16
    30: (1, 2),  # bfloat16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
}


@dataclass(frozen=True)
class GGUFTensor:
    """shape: slowest dimension first, as numpy and torch have it. data: the raw bytes (uint8), not yet dequantised."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    data: npt.NDArray[np.uint8] = field(repr=False)


@dataclass(frozen=True)
class GGUFFile:
    """metadata: key → number, bool, string or list of these. tensors: views into the mapped file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Value of an architecture's own key, e.g. ``get("block_count")`` for ``llama.block_count``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def __str__(self) -> str:
        return str(self.path)


class _Cursor:
    """A position in the file's bytes. Running off the end raises struct.error or ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        n = self.scalar("Q")
        end = self.at + n
        if end > len(self.data):
            raise ValueError("a string runs past the end of the file")
        value = self.data[self.at : end].decode("utf-8", errors="replace")
        self.at = end
        return value

    def strings(self, n: int) -> list[str]:
        """As ``n`` calls of ``string``, written out: a vocabulary has 100,000 of them."""
        data, at, size_of, end_of_file = self.data, self.at, struct.Struct("<Q").unpack_from, len(self.data)
        values = []
        for _ in range(n):
            begin = at + 8
            at = begin + size_of(data, at)[0]
            if at > end_of_file:
                raise ValueError("a string runs past the end of the file")
            values.append(data[begin:at].decode("utf-8", errors="replace"))
        self.at = at
        return values

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            item, n = self.scalar("I"), self.scalar("Q")
            return self.array(item, n)
        if kind not in SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self.scalar(SCALARS[kind])

    def array(self, kind: int, n: int) -> list[Any]:
        if kind == STRING:
            return self.strings(n)
        if kind not in SCALARS:
            return [self.value(kind) for _ in range(n)]
        code = f"<{n}{SCALARS[kind]}"
        values = list(struct.unpack_from(code, self.data, self.at))
        self.at += struct.calcsize(code)
        return values


@contextmanager
def damage_reported(path: Path) -> Iterator[None]:
    """What arithmetic on nonsense raises, as a ModelLoadError: a damaged header can say anything about sizes."""
    try:
        yield
    except (struct.error, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ModelLoadError(f"{path} is damaged or cut short: {error}") from error


def read_gguf(path: Path) -> GGUFFile:
    """Map a GGUF file. Raises ModelLoadError when it is not one, is of an unknown version, or is cut short."""
    try:
        with path.open("rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if data[:4] != MAGIC:
        raise ModelLoadError(f"{path} is not a GGUF file: it begins with {data[:4]!r} instead of {MAGIC!r}")
    with damage_reported(path):
        return _read(path, data)


def open_model(model: Path | GGUFFile) -> Path | GGUFFile:
    """A model as all loaders take it: a directory as it is, a GGUF file read, so that a process reads it once.

    Raises ModelLoadError as ``read_gguf``.
    """
    return model if isinstance(model, GGUFFile) or model.is_dir() else read_gguf(model)


def _read(path: Path, data: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(data)
    cursor.at = len(MAGIC)
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ModelLoadError(f"{path} is GGUF version {version}; versions 2 and 3 can be read")
    n_tensors, n_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(n_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = []
    for _ in range(n_tensors):
        name = cursor.string()
        dims = cursor.array(10, cursor.scalar("I"))  # fastest dimension first
        infos.append((name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")))
    alignment = int(metadata.get("general.alignment", 32))
    base = math.ceil(cursor.at / alignment) * alignment
    tensors = {info[0]: _tensor(data, base, *info) for info in infos}
    return GGUFFile(path, metadata, tensors)


def _tensor(
    data: mmap.mmap, base: int, name: str, shape: tuple[int, ...], type_id: int, offset: int
) -> GGUFTensor:
    block, block_bytes = block_size(type_id)
    if math.prod(shape) % block:
        raise ValueError(f"tensor {name!r} of shape {list(shape)} is not made of blocks of {block}")
    n_bytes = math.prod(shape) // block * block_bytes
    if base + offset + n_bytes > len(data):
        raise ValueError(f"tensor {name!r} ends at byte {base + offset + n_bytes} of {len(data)}")
    raw = np.frombuffer(data, np.uint8, n_bytes, base + offset)
    return GGUFTensor(name, shape, type_id, raw)


def block_size(type_id: int) -> tuple[int, int]:
    """Values and bytes of a block of a type, by ggml's number."""
    if type_id in BLOCK_SIZES:
        return BLOCK_SIZES[type_id]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    return int(block), int(block_bytes)
