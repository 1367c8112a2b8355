"""What is set in the environment before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trellis.runtime import assembly

KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


@pytest.mark.parametrize("name", KERNEL_CACHES)
def test_kernel_caches_are_bounded_unless_the_user_says_otherwise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in KERNEL_CACHES:
        monkeypatch.setenv(each, "")  # so that what is set here does not stay
        monkeypatch.delenv(each)
    monkeypatch.setenv(name, "7")
    assembly._bound_kernel_caches()
    others = {each: os.environ[each] for each in KERNEL_CACHES if each != name}
    assert os.environ[name] == "7"
    assert set(others.values()) == {str(assembly.KERNELS_KEPT)}


def test_nothing_that_reads_them_is_loaded_before_they_are_set() -> None:
    code = "import sys, trellis.runtime.engine, trellis.runtime.assembly; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
