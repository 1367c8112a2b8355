"""Chat formats by name, for servers and APIs whose model brings no template of its own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping

from trellis.chat_format import ChatFormat, chained
from trellis.errors import InvalidRequestError

_ROLES = ("system", "user", "assistant")


class ChatTemplates:
    """Formats by name. One of these serves the process (``CHAT_TEMPLATES``): a format that is registered in one
    thread is known in all."""

    def __init__(self, known: Mapping[str, ChatFormat]) -> None:
        self._lock = threading.Lock()
        self._known = dict(known)

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._known)

    def get(self, name: str) -> ChatFormat:
        """Raises InvalidRequestError that names the known ones."""
        with self._lock:
            found = self._known.get(name)
        if found is not None:
            return found
        import difflib

        names = self.names()
        near = difflib.get_close_matches(str(name), names, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise InvalidRequestError("chat_template", f"{name!r} is not known{hint}; known: {', '.join(names)}")

    def register(self, name: str, form: ChatFormat) -> None:
        """Raises InvalidRequestError for a name that is taken by another format."""
        if not isinstance(name, str) or not name:
            raise InvalidRequestError("name", f"must be a non-empty string, got {name!r}")
        if not isinstance(form, ChatFormat):
            raise InvalidRequestError("format", f"must be a ChatFormat, got {type(form).__name__}")
        with self._lock:
            if self._known.setdefault(name, form) != form:
                raise InvalidRequestError(
                    "name", f"there is another chat template {name!r}; take another name"
                )


def _marked(
    prefix: str, suffix: str, begin: str = "", default_system: str = "", stop: str = ""
) -> ChatFormat:
    """Every role between the same markers; ``{}`` in the prefix stands for its name."""
    roles = {role: (prefix.format(role), suffix) for role in _ROLES}
    return ChatFormat(roles, default_system, begin, stop=(stop,) if stop else ())


def _trimmed(prefix: str, suffix: str, begin: str, stop: str) -> ChatFormat:
    """As ``_marked``, with the blanks around every content stripped."""
    pairs = list(itertools.product(("", *_ROLES), _ROLES))
    joints = {(left, role): ("" if left else begin) + prefix.format(role) for left, role in pairs}
    return chained(
        joints, dict.fromkeys(_ROLES, suffix), begin=begin, strips=dict.fromkeys(pairs, "both"), stop=(stop,)
    )


def _folded(
    user: tuple[str, str],
    assistant: tuple[str, str],
    *,
    begin: str = "",
    system: tuple[str, str] = ("", "\n\n"),
    generation: str | None = None,
    strips: str = "",
) -> ChatFormat:
    """Questions and answers in turns; the system message stands inside the first question, before its text."""
    return chained(
        {
            ("", "system"): begin + user[0] + system[0],
            ("", "user"): begin + user[0],
            ("system", "user"): "",
            ("user", "assistant"): assistant[0],
            ("assistant", "user"): user[0],
        },
        {"system": system[1], "user": user[1], "assistant": assistant[1]},
        begin=begin,
        generation=None if generation is None else {"user": generation},
        strips=dict.fromkeys([("", "user"), ("assistant", "user"), ("user", "assistant")], strips)
        | {("system", "user"): {"both": "right"}.get(strips, "")},
        stop=(assistant[1].strip(),),
    )


def built_in() -> dict[str, ChatFormat]:
    """The formats that are known from the start."""
    turn = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>"
    return {
        "plain": ChatFormat(),
        "chatml": _marked("<|im_start|>{}\n", "<|im_end|>\n", stop="<|im_end|>"),
        "llama-2": _folded(
            ("<s>[INST] ", " [/INST]"),
            (" ", " </s>"),
            system=("<<SYS>>\n", "\n<</SYS>>\n\n"),
            generation="",
            strips="both",
        ),
        "llama-3": _trimmed(
            "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", "<|begin_of_text|>", "<|eot_id|>"
        ),
        "mistral": _folded(("[INST] ", "[/INST]"), (" ", "</s>"), begin="<s>", generation=""),
        "gemma": _folded(
            ("<start_of_turn>user\n", "<end_of_turn>\n"),
            ("<start_of_turn>model\n", "<end_of_turn>\n"),
            begin="<bos>",
            strips="both",
        ),
        "phi-3": _marked("<|{}|>\n", "<|end|>\n", stop="<|end|>"),
        "zephyr": _marked("<|{}|>\n", "</s>\n", stop="</s>"),
        "granite": _marked("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n", stop="<|end_of_text|>"),
        "glm-4": _marked("<|{}|>\n", "", begin="[gMASK]<sop>", stop="<|user|>"),
        "vicuna": ChatFormat(
            {"system": ("", " "), "user": ("USER: ", " "), "assistant": ("ASSISTANT: ", "</s>")},
            stop=("</s>",),
        ),
        "deepseek": ChatFormat(
            {
                "system": ("", ""),
                "user": ("<｜User｜>", ""),
                "assistant": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
            },
            begin="<｜begin▁of▁sentence｜>",
            thinking_end="</think>",
            stop=("<｜end▁of▁sentence｜>",),
        ),
        "command-r": ChatFormat(
            {
                role: (turn.format(name), "<|END_OF_TURN_TOKEN|>")
                for role, name in zip(_ROLES, ("SYSTEM", "USER", "CHATBOT"), strict=True)
            },
            begin="<BOS_TOKEN>",
            stop=("<|END_OF_TURN_TOKEN|>",),
        ),
    }


CHAT_TEMPLATES = ChatTemplates(built_in())


def get_chat_template(name: str) -> ChatFormat:
    """The chat format of this name. Raises InvalidRequestError that names the known ones."""
    return CHAT_TEMPLATES.get(name)


def register_chat_template(
    name: str,
    format: ChatFormat | None = None,
    *,
    roles: Mapping[str, tuple[str, str]] | None = None,
    default_system: str = "",
    begin: str = "",
    stop: tuple[str, ...] = (),
) -> ChatFormat:
    """Give a chat format a name, for ``chat_template=`` of the backends. Returns the format.

    Either format, or its parts: roles (role → (prefix, suffix)) and, see ``ChatFormat``, the others.
    Raises InvalidRequestError when the name is taken by another format.
    """
    if (format is None) == (roles is None):
        raise InvalidRequestError("format", "give either a ChatFormat, or roles={role: (prefix, suffix)}")
    if roles is not None:
        for role, pair in roles.items():
            if len(pair) != 2 or isinstance(pair, str):
                raise InvalidRequestError(f"roles[{role!r}]", f"must be (prefix, suffix), got {pair!r}")
        made = {role: (prefix, suffix) for role, (prefix, suffix) in roles.items()}
        format = ChatFormat(made, default_system, begin, stop=tuple(stop))
    assert format is not None
    CHAT_TEMPLATES.register(name, format)
    return format


def chat_format_of(chosen: str | ChatFormat | None) -> ChatFormat | None:
    """What ``chat_template=`` of a backend means: a name, a format, or None for the model's own."""
    if chosen is None or isinstance(chosen, ChatFormat):
        return chosen
    return CHAT_TEMPLATES.get(chosen)
