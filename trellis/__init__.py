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
        Anthropic,
        AsyncProgramState,
        AsyncProgramStateGroup,
        Backend,
        ChatFormat,
        Engine,
        Gen,
        LiteLLM,
        Meta,
        MockAnswer,
        MockBackend,
        OpenAI,
        Price,
        Program,
        ProgramState,
        ProgramStateGroup,
        Report,
        RuntimeEndpoint,
        Select,
        SelectMeta,
        Timeline,
        assistant,
        assistant_begin,
        assistant_end,
        flush_cache,
        fork,
        function,
        gen,
        get_chat_template,
        image,
        join,
        register_chat_template,
        role,
        select,
        server_info,
        set_default_backend,
        system,
        system_begin,
        system_end,
        timeline,
        user,
        user_begin,
        user_end,
        video,
    )

__version__ = "0.1.0"

__all__ = [
    "Anthropic",
    "AsyncProgramState",
    "AsyncProgramStateGroup",
    "Backend",
    "BackendError",
    "CapacityError",
    "ChatFormat",
    "ConstraintError",
    "Engine",
    "Gen",
    "InvalidRequestError",
    "LiteLLM",
    "Meta",
    "MockAnswer",
    "MockBackend",
    "ModelLoadError",
    "OpenAI",
    "Price",
    "Program",
    "ProgramError",
    "ProgramState",
    "ProgramStateGroup",
    "Report",
    "RequestAborted",
    "RuntimeEndpoint",
    "Select",
    "SelectMeta",
    "Timeline",
    "TrellisError",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "fork",
    "function",
    "gen",
    "get_chat_template",
    "image",
    "join",
    "register_chat_template",
    "role",
    "select",
    "server_info",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "timeline",
    "user",
    "user_begin",
    "user_end",
    "video",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trellis' has no attribute {name!r}")
    value = getattr(import_module("trellis.frontend"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
