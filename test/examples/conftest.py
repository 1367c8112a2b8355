from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from trellis.frontend import Backend, set_default_backend

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports an example by its name. No default backend is left afterwards."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    yield load
    set_default_backend(None)


@pytest.fixture
def on_the_model(engine: Backend) -> None:
    """The default backend is the real model."""
    set_default_backend(engine)
