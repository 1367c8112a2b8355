"""Kernels are compiled once, safely, and where they cannot be had torch does the work."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from trellis.errors import ModelLoadError
from trellis.runtime.executor import ModelRunner
from trellis.runtime.executor.contract import Extend
from trellis.runtime.native import build as building
from trellis.runtime.native.build import KernelsUnavailable, build, find_compiler
from trellis.runtime.native.isa import INSTRUCTION_SETS, InstructionSet, available
from trellis.runtime.native.library import best_library

PORTABLE = INSTRUCTION_SETS[-1]
TINY = 'extern "C" int trellis_answer() { return 42; }\n'


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and sources that compile in no time."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "tiny.cpp").write_text(TINY)
    monkeypatch.setattr(building, "SOURCES", sources)
    monkeypatch.setenv("TRELLIS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def no_compiler(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.so"))


def test_compiles_once_with_one_line_of_progress(cache, capfd):
    first = build(PORTABLE)
    assert capfd.readouterr().err.count("compiling the CPU kernels for portable") == 1
    stamp = first.stat().st_mtime_ns
    assert build(PORTABLE) == first
    assert first.stat().st_mtime_ns == stamp
    assert capfd.readouterr().err == ""
    assert libraries(cache) == [first]


def test_a_change_of_sources_or_flags_makes_another(cache, tmp_path):
    first = build(PORTABLE)
    (tmp_path / "src" / "more.h").write_text("// nothing\n")
    second = build(PORTABLE)
    third = build(InstructionSet("portable", frozenset(), ("-DOTHER",)))
    assert libraries(cache) == sorted({first, second, third})
    assert len({first, second, third}) == 3


def test_processes_that_compile_at_once_agree(cache, tmp_path):
    code = (
        "from pathlib import Path; from trellis.runtime.native import build as b; "
        f"b.SOURCES = Path({str(tmp_path / 'src')!r}); "
        "from trellis.runtime.native.isa import INSTRUCTION_SETS; print(b.build(INSTRUCTION_SETS[-1]))"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    results = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len({out for out, _ in results}) == 1
    assert sum("compiling" in err for _, err in results) == 1
    assert len(libraries(cache)) == 1


def test_the_cache_is_private(cache):
    build(PORTABLE)
    assert cache.stat().st_mode & 0o077 == 0


def test_a_cache_that_others_may_write_is_not_used(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    made = build(PORTABLE)
    assert made.parent != cache
    assert made.parent.stat().st_mode & 0o077 == 0
    assert libraries(cache) == []


def test_a_compile_error_is_shown_and_leaves_nothing(cache, tmp_path):
    (tmp_path / "src" / "tiny.cpp").write_text("int broken = ;\n")
    with pytest.raises(KernelsUnavailable, match="error: expected"):
        build(PORTABLE)
    assert libraries(cache) == []


@pytest.mark.usefixtures("cache")
def test_an_instruction_set_that_the_compiler_does_not_know_is_passed_over(tmp_path):
    source = "\n".join(
        f'extern "C" __attribute__((visibility("default"))) int {name}() {{ return 0; }}'
        for name in exported()
    )
    (tmp_path / "src" / "tiny.cpp").write_text(source)
    unknown = InstructionSet("next-decade", frozenset(), ("-mnext-decade",))
    assert best_library((unknown, PORTABLE)).isa == "portable"
    with pytest.raises(KernelsUnavailable, match="next-decade"):
        best_library((unknown,))


def exported() -> list[str]:
    text = (Path(building.__file__).parent / "src" / "abi.cpp").read_text()
    return sorted(
        {word.split("(")[0] for word in text.replace("*", " ").split() if word.startswith("trellis_")}
    )


def test_compiler_of_the_environment_comes_first(monkeypatch):
    monkeypatch.setenv("CXX", f"{sys.executable} -q")
    assert find_compiler() == [sys.executable, "-q"]
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(
        KernelsUnavailable, match=r"no C\+\+ compiler is installed \(c\+\+, g\+\+, clang\+\+, or \$CXX\)"
    ):
        find_compiler()


def test_portable_kernels_are_the_last_resort(monkeypatch):
    from trellis.runtime.native import isa

    monkeypatch.setattr(isa, "cpu_features", lambda: frozenset())
    assert [each.name for each in available()] == ["portable"]
    avx2 = next(each for each in INSTRUCTION_SETS if each.name == "avx2")
    monkeypatch.setattr(isa, "cpu_features", lambda: avx2.needs | {"avx512f"})
    assert [each.name for each in available()] == ["avx2", "portable"]


def logits(runner: ModelRunner) -> torch.Tensor:
    extend = Extend(np.array([1, 2, 3], np.int32), 0, np.array([5, 6, 7], np.int32), 0)
    return runner.forward([extend]).take([0, 1, 2])


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_does_the_same(tiny_model, caplog):
    with caplog.at_level(logging.WARNING):
        runner = ModelRunner(tiny_model, 32)
    assert runner.step.name == "torch"
    (record,) = caplog.records
    assert "computed by torch" in record.message
    assert "'no-such-compiler' that $CXX names is not there" in record.message
    native = logits(runner)
    torch.testing.assert_close(logits(ModelRunner(tiny_model, 32, executor="torch")), native)


def test_native_is_the_default_and_equals_torch(tiny_model):
    runner = ModelRunner(tiny_model, 32)
    assert runner.step.name == "native"
    want = logits(ModelRunner(tiny_model, 32, executor="torch"))
    torch.testing.assert_close(logits(runner), want, atol=1e-4, rtol=0)


@pytest.mark.usefixtures("no_compiler")
def test_native_that_was_asked_for_and_cannot_be_had_is_an_error(tiny_model):
    with pytest.raises(ModelLoadError, match=r"the native executor cannot be used: the C\+\+ compiler"):
        ModelRunner(tiny_model, 32, executor="native")


def test_named_attention_belongs_to_torch(tiny_model):
    assert ModelRunner(tiny_model, 32, attention="torch").step.name == "torch"
    with pytest.raises(ModelLoadError, match="attention of its own"):
        ModelRunner(tiny_model, 32, attention="torch", executor="native")
    with pytest.raises(ModelLoadError, match="executor 'fast' is unknown; known: auto, native, torch"):
        ModelRunner(tiny_model, 32, executor="fast")
