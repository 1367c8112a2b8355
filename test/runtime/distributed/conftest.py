"""Tiny models of every family, and some whose heads do not split evenly."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

HERE = Path(__file__).parent
# For rank_fakes, and the fakes of the scheduler and of a device.
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("scheduler", "native", "cuda"))]


def load_by_path(name: str, path: Path) -> Any:
    """A file of another folder of tests, which are no packages."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


from scheduler_fakes import SIZE  # noqa: E402

tinies = load_by_path("distributed_tinies", HERE.parent / "models" / "conftest.py")
servers = load_by_path("distributed_servers", HERE.parent / "server" / "conftest.py")
launching = load_by_path("distributed_launching", HERE.parent / "server" / "test_launch_server.py")
tiny_model = servers.tiny_model

UNEVEN = {
    "one-kv-head": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "three-kv-heads": {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
    "odd-vocabulary": {"vocab_size": 319},
}
FAMILIES = {
    **tinies.FAMILIES,
    **{
        name: lambda changes=changes: transformers.LlamaConfig(**{**tinies.SIZES, **changes})
        for name, changes in UNEVEN.items()
    },
}
tinies.FAMILIES.update(FAMILIES)
tinies.FAMILIES["small-vocabulary"] = lambda: transformers.LlamaConfig(**{**tinies.SIZES, "vocab_size": SIZE})


@pytest.fixture(scope="session")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The tiny model of a family. (No parameters of a fixture: pytest would set up the groups once a family.)"""
    return functools.cache(lambda family: tinies.make_tiny(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tiny_of: Callable[[str], Any]) -> Any:
    return tiny_of(request.param)


@pytest.fixture
def tiny_llama(tiny_of: Callable[[str], Any]) -> Any:
    return tiny_of("llama")
