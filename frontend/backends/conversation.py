"""What a program has said so far, as the messages that a chat API takes."""

from __future__ import annotations

from dataclasses import dataclass

from trellis.errors import InvalidRequestError


@dataclass(frozen=True)
class Conversation:
    """messages: (role, content) of the roles that have ended.

    role: the one that is open (None: none is), and said: what stands in it so far. loose: what the program wrote
    outside of all roles.
    """

    messages: tuple[tuple[str, str], ...]
    role: str | None = None
    said: str = ""
    loose: str = ""


def check_conversation(given: Conversation | None, api: str, continues: bool) -> Conversation:
    """A conversation that a chat API can answer. InvalidRequestError, which says what to write instead, for text
    outside of roles, an answer outside of ``assistant``, and one that is to go on from text in its own message,
    unless the API ``continues`` such a message.
    """
    if given is None:
        raise InvalidRequestError("role", f"{api} takes messages, and this request has none")
    if given.loose.strip():
        reason = (
            f"{api} takes messages only; put {given.loose.strip()[:60]!r} inside system(...) or user(...)"
        )
        raise InvalidRequestError("role", reason)
    if given.role != "assistant":
        place = f"inside {given.role!r}" if given.role else "outside of all roles"
        reason = f"{api} writes assistant messages only; write assistant(gen(...)) instead of a gen {place}"
        raise InvalidRequestError("role", reason)
    if not given.messages:
        raise InvalidRequestError("role", f"{api} needs a message before its answer; append user(...) first")
    if given.said and not continues:
        reason = (
            f"{api} cannot go on from text in the assistant's own message ({given.said[:60]!r}); "
            "put the text into user(...), or use a completions API or a server that continues messages"
        )
        raise InvalidRequestError("role", reason)
    return given
