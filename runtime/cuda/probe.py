"""Which GPU there is, asked of the driver itself: the process that only settles flags does not load torch."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRIVER = "libcuda.so.1"
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # of CUdevice_attribute


@dataclass(frozen=True)
class Gpu:
    """The first GPU that this process may use. capability: of its kernels, such as (9, 0). memory: bytes."""

    name: str
    capability: tuple[int, int]
    memory: int


def find_gpu(driver: Any = None) -> Gpu | None:
    """None where there is no driver, or it shows no GPU (CUDA_VISIBLE_DEVICES counts). Makes no context, so it takes no memory
    of the GPU.

    driver: the functions of the CUDA driver API; None loads it. Source: CUDA driver API, "Device Management".
    """
    if driver is None:
        try:
            driver = ctypes.CDLL(DRIVER)
        except OSError:
            return None
    count, device, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    name = ctypes.create_string_buffer(256)
    major, minor = ctypes.c_int(), ctypes.c_int()
    failed = (
        driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetName(name, len(name), device)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), CAPABILITY_MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), CAPABILITY_MINOR, device)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    )
    return None if failed else Gpu(name.value.decode(), (major.value, minor.value), memory.value)


def torch_cuda_version(version_file: Path | None = None) -> str | None:
    """The CUDA that the installed torch was built with, such as ``13.0``; None for a CPU build, or without torch.

    Read from the file that says so. version_file: another one than the installed torch's.
    """
    if version_file is None:
        found = importlib.util.find_spec("torch")
        if found is None or found.origin is None:
            return None
        version_file = Path(found.origin).with_name("version.py")
    try:
        text = version_file.read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None
