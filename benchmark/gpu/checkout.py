"""Imports of a checkout that was not installed, on a machine that has torch but not all that a server needs.

Only the standard library may be imported here, and nothing of the project: it is what makes the project importable.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

ROOMS = ("frontend", "radix", "fsm", "runtime")  # folders at the top level that are packages of ``trellis``


def make_importable(root: Path) -> list[str]:
    """``import trellis.runtime`` and ``import benchmark`` work afterwards. Returns what was done for that, in words."""
    notes = []
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if importlib.util.find_spec("trellis") is None or importlib.util.find_spec("trellis.runtime") is None:
        sys.meta_path.insert(0, _Rooms(root))
        notes.append("trellis is not installed: its packages are taken from the checkout")
    if importlib.util.find_spec("msgspec") is None:
        sys.modules["msgspec"] = stand_in()
        notes.append(
            "msgspec is not installed: messages are plain dataclasses here, as none leaves the process"
        )
    return notes


class _Rooms(MetaPathFinder):
    """Finds ``trellis.radix`` in ``radix/``, as the installed package does."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        package, _, room = name.partition(".")
        if package != "trellis" or room not in ROOMS:
            return None
        folder = self._root / room
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def stand_in() -> types.ModuleType:
    """A module with as much of msgspec as messages need that are made and read in one process: ``Struct``."""
    module = types.ModuleType("msgspec")
    module.Struct = _Struct  # type: ignore[attr-defined]
    return module


class _Struct:
    """A subclass is a dataclass of its annotations. Defaults that can change are copied for each instance, as msgspec does."""

    def __init_subclass__(cls, frozen: bool = False, kw_only: bool = False, **_: Any) -> None:
        for name, value in list(vars(cls).items()):
            if name in cls.__annotations__ and isinstance(value, (list, dict, set)):
                setattr(cls, name, dataclasses.field(default_factory=value.copy))
        dataclasses.dataclass(frozen=frozen, kw_only=kw_only)(cls)
