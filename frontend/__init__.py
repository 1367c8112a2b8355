"""The language: programs that call a model (``gen``, ``select``, ``fork``, ``join``) and where they run.

Importing it loads neither a model library nor an HTTP client; backends load what they need when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trellis.frontend.backends.base import Backend, ChatFormat, Counts
from trellis.frontend.choices import ChoiceMethod
from trellis.frontend.defaults import flush_cache, server_info, set_default_backend
from trellis.frontend.expressions import (
    Expr,
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    role,
    select,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from trellis.frontend.group import ProgramStateGroup, fork, join
from trellis.frontend.program import Program, function
from trellis.frontend.report import Report
from trellis.frontend.state import ProgramState
from trellis.frontend.variable import Meta, SelectMeta

if TYPE_CHECKING:
    from trellis.frontend.backends.endpoint import RuntimeEndpoint
    from trellis.frontend.backends.engine import Engine
    from trellis.frontend.backends.mock import MockAnswer, MockBackend

_LAZY = {
    "Engine": "trellis.frontend.backends.engine",
    "MockAnswer": "trellis.frontend.backends.mock",
    "MockBackend": "trellis.frontend.backends.mock",
    "RuntimeEndpoint": "trellis.frontend.backends.endpoint",
}

__all__ = [
    "Backend",
    "ChatFormat",
    "ChoiceMethod",
    "Counts",
    "Engine",
    "Expr",
    "Meta",
    "MockAnswer",
    "MockBackend",
    "Program",
    "ProgramState",
    "ProgramStateGroup",
    "Report",
    "RuntimeEndpoint",
    "SelectMeta",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "fork",
    "function",
    "gen",
    "join",
    "role",
    "select",
    "server_info",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "user",
    "user_begin",
    "user_end",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)
