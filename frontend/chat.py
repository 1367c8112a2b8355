"""Role text, exactly as the model's own chat template writes it (see ``ChatFormat``)."""

from __future__ import annotations

from trellis.errors import InvalidRequestError
from trellis.frontend.backends.base import ChatFormat


def _markers(chat: ChatFormat, role: str) -> tuple[str, str]:
    markers = chat.roles.get(role)
    if markers is None:
        known = ", ".join(sorted(chat.roles)) or "none"
        raise InvalidRequestError("role", f"the model's chat template has no role {role!r}; it has: {known}")
    return markers


def opening(chat: ChatFormat, role: str, *, first: bool, at_start: bool) -> str:
    """Text before a message's content.

    first: no message came before, so the template's default system message goes in front of any other role.
    at_start: nothing at all came before, so the template's opening goes in front.
    """
    prefix, _ = _markers(chat, role)
    begin = chat.begin if at_start else ""
    default = chat.default_system if first and role != "system" else ""
    return begin + default + prefix


def closing(chat: ChatFormat, role: str) -> str:
    """Text after a message's content."""
    return _markers(chat, role)[1]
