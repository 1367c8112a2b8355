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
    Gen,
    Select,
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
from trellis.frontend.media import image, video
from trellis.frontend.price import Price
from trellis.frontend.program import Program, function
from trellis.frontend.report import Report
from trellis.frontend.state import ProgramState
from trellis.frontend.variable import Meta, SelectMeta

if TYPE_CHECKING:
    from trellis.chat_templates import get_chat_template, register_chat_template
    from trellis.frontend.async_group import AsyncProgramStateGroup
    from trellis.frontend.async_state import AsyncProgramState
    from trellis.frontend.backends.anthropic import Anthropic
    from trellis.frontend.backends.endpoint import RuntimeEndpoint
    from trellis.frontend.backends.engine import Engine
    from trellis.frontend.backends.litellm import LiteLLM
    from trellis.frontend.backends.mock import MockAnswer, MockBackend
    from trellis.frontend.backends.openai import OpenAI
    from trellis.frontend.timelines import Timeline, timeline

_LAZY = {
    "AsyncProgramState": "trellis.frontend.async_state",
    "AsyncProgramStateGroup": "trellis.frontend.async_group",
    "Anthropic": "trellis.frontend.backends.anthropic",
    "Engine": "trellis.frontend.backends.engine",
    "LiteLLM": "trellis.frontend.backends.litellm",
    "MockAnswer": "trellis.frontend.backends.mock",
    "MockBackend": "trellis.frontend.backends.mock",
    "OpenAI": "trellis.frontend.backends.openai",
    "RuntimeEndpoint": "trellis.frontend.backends.endpoint",
    "Timeline": "trellis.frontend.timelines",
    "get_chat_template": "trellis.chat_templates",
    "register_chat_template": "trellis.chat_templates",
    "timeline": "trellis.frontend.timelines",
}

__all__ = [
    "Anthropic",
    "AsyncProgramState",
    "AsyncProgramStateGroup",
    "Backend",
    "ChatFormat",
    "ChoiceMethod",
    "Counts",
    "Engine",
    "Expr",
    "Gen",
    "LiteLLM",
    "Meta",
    "MockAnswer",
    "MockBackend",
    "OpenAI",
    "Price",
    "Program",
    "ProgramState",
    "ProgramStateGroup",
    "Report",
    "RuntimeEndpoint",
    "Select",
    "SelectMeta",
    "Timeline",
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
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)
