"""Trellis: a Python language for model programs, and the runtime that serves it.

    from trellis import Engine, function, gen, set_default_backend

    @function
    def capital(s, country):
        s += f"The capital of {country} is" + gen("city", max_tokens=4, stop=".")

    set_default_backend(Engine("smollm2-135m"))
    print(capital.run(country="France")["city"])

Importing this package loads neither torch nor the server; names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trellis.errors import (
    BackendError,
    CapacityError,
    ConstraintError,
    InvalidRequestError,
    ModelLoadError,
    ProgramError,
    RequestAborted,
    TrellisError,
)

if TYPE_CHECKING:
    from trellis.frontend import (
        Backend,
        ChatFormat,
        Engine,
        Meta,
        MockAnswer,
        MockBackend,
        Program,
        ProgramState,
        ProgramStateGroup,
        Report,
        RuntimeEndpoint,
        SelectMeta,
        assistant,
        assistant_begin,
        assistant_end,
        flush_cache,
        fork,
        function,
        gen,
        join,
        role,
        select,
        server_info,
        set_default_backend,
        system,
        system_begin,
        system_end,
        user,
        user_begin,
        user_end,
    )

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "BackendError",
    "CapacityError",
    "ChatFormat",
    "ConstraintError",
    "Engine",
    "InvalidRequestError",
    "Meta",
    "MockAnswer",
    "MockBackend",
    "ModelLoadError",
    "Program",
    "ProgramError",
    "ProgramState",
    "ProgramStateGroup",
    "Report",
    "RequestAborted",
    "RuntimeEndpoint",
    "SelectMeta",
    "TrellisError",
    "__version__",
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
    if name not in __all__:
        raise AttributeError(f"module 'trellis' has no attribute {name!r}")
    value = getattr(import_module("trellis.frontend"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
