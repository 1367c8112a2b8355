"""What a chat template does to one message, derived by rendering conversations and comparing the results.

The language adds text piece by piece, so it needs the template as prefixes and suffixes of roles instead of a
program over whole conversations. Most templates are of that form; where one is not (a system message folded into
the first user turn, say), the nearest form is given and marked as not exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trellis.errors import InvalidRequestError
from trellis.runtime.models.chat_template import ChatTemplate

SYSTEM, USER, ASSISTANT, USER2, ASSISTANT2 = "Sy5temQ", "Us3rQ", "Ass1stQ", "Us3rTwoQ", "Ass1stTwoQ"
PLAIN_ROLES = {
    "system": ("SYSTEM: ", "\n"),
    "user": ("USER: ", "\n"),
    "assistant": ("ASSISTANT: ", "\n"),
}


@dataclass(frozen=True)
class ChatFormat:
    """roles: role → (prefix, suffix). default_system: what the template puts in front when the first message is not
    from the system, wrapped in its markers. begin: text before everything. exact: joining these pieces gives the
    template's own text for every conversation that was tried."""

    roles: Mapping[str, tuple[str, str]]
    default_system: str = ""
    begin: str = ""
    exact: bool = True

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the pieces spell it."""
        text = self.begin
        if not messages or messages[0]["role"] != "system":
            text += self.default_system
        for message in messages:
            prefix, suffix = self.roles[message["role"]]
            text += prefix + message["content"] + suffix
        return text + self.roles["assistant"][0] if add_generation_prompt else text


def derive_chat_format(template: ChatTemplate, bos_token: str) -> ChatFormat:
    """The template as a ChatFormat. Never raises: a template that fits no form gives plain role names."""
    try:
        form = _derive(template, bos_token)
    except (InvalidRequestError, ValueError):
        return ChatFormat(PLAIN_ROLES, exact=False)
    return ChatFormat(form.roles, form.default_system, form.begin, _agrees(form, template))


def _derive(template: ChatTemplate, bos_token: str) -> ChatFormat:
    user, assistant, again = _message("user", USER), _message("assistant", ASSISTANT), _message("user", USER2)
    # After a user message: its suffix, then with the generation prompt also the assistant's prefix.
    (before_user, after_user) = _split(template.render([user], False), USER)
    (_, with_prompt) = _split(template.render([user], True), USER)
    (_, user_to_assistant, assistant_to_user, _) = _split(
        template.render([user, assistant, again], False), USER, ASSISTANT, USER2
    )
    (_, _, assistant_suffix) = _split(template.render([user, assistant], False), USER, ASSISTANT)
    user_suffix = _common_prefix(after_user, user_to_assistant)
    prompt = with_prompt.removeprefix(user_suffix)
    assistant_prefix = prompt or user_to_assistant.removeprefix(user_suffix)
    assistant_suffix = _common_prefix(assistant_suffix, assistant_to_user)
    user_prefix = assistant_to_user.removeprefix(assistant_suffix)
    head = before_user.removesuffix(user_prefix)  # begin + default system text
    roles = {"user": (user_prefix, user_suffix), "assistant": (assistant_prefix, assistant_suffix)}

    system = _system_role(template, user_prefix)
    # A BOS that every turn begins with belongs to the turns, not to the beginning.
    own_bos = bos_token and head.startswith(bos_token) and not user_prefix.startswith(bos_token)
    begin = bos_token if own_bos else ""
    if system is None:  # folded into a user turn, or refused
        return ChatFormat({**roles, "system": roles["user"]}, head.removeprefix(begin), begin)
    before_system, system_suffix = system
    if before_system.startswith(head):  # no default text: all that stands in front is the beginning
        begin = head
    if not before_system.startswith(begin):
        begin = ""
    roles["system"] = (before_system.removeprefix(begin), system_suffix)
    return ChatFormat(roles, head.removeprefix(begin), begin)


def _system_role(template: ChatTemplate, user_prefix: str) -> tuple[str, str] | None:
    """(what stands before the system text, its suffix); None if it has no turn of its own."""
    messages = [_message("system", SYSTEM), _message("user", USER)]
    try:
        before, between, _ = _split(template.render(messages, False), SYSTEM, USER)
    except (InvalidRequestError, ValueError):
        return None
    if not between.endswith(user_prefix):
        return None
    return before, between.removesuffix(user_prefix)


def _agrees(form: ChatFormat, template: ChatTemplate) -> bool:
    system, user, again = (
        _message("system", "Be brief."),
        _message("user", "Hi there"),
        _message("user", "And\nnow?"),
    )
    assistant, last = _message("assistant", "Hello, you."), _message("assistant", "Bye.")
    conversations = [
        [user],
        [user, assistant],
        [user, assistant, again],
        [system, user],
        [system, user, assistant, again, last],
    ]
    try:
        return all(
            form.render(messages, prompt) == template.render(messages, prompt)
            for messages in conversations
            for prompt in ([True, False] if messages[-1]["role"] == "user" else [False])
        )
    except InvalidRequestError:
        return False


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _split(text: str, *marks: str) -> list[str]:
    """The pieces of ``text`` around the marks, which must each be there once, in order. ValueError otherwise."""
    pieces = []
    for mark in marks:
        if text.count(mark) != 1:
            raise ValueError(f"{mark!r} appears {text.count(mark)} times")
        piece, text = text.split(mark)
        pieces.append(piece)
    return [*pieces, text]


def _common_prefix(a: str, b: str) -> str:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]
