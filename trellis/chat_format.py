"""A chat template as plain data: what it writes around each message, depending on the messages before.

The language adds text piece by piece, so it needs the template in this form instead of as a program over whole
conversations. The runtime derives it from a model's own template; both sides of the HTTP API read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from trellis.errors import InvalidRequestError

STRIPS = ("", "left", "right", "both")


@dataclass(frozen=True)
class Turn:
    """A kind of message: its role, at a certain place of the conversation.

    opening: text before content that is given. generation: text before content that the model is to write (the
        template's generation prompt). closing: text after the content.
    strips: on which sides the template strips blanks off the content: ``left``, ``right``, ``both`` or neither.
    then: role of the message after this one → index of its turn. refuses: role → why it cannot come next.
    """

    role: str = ""
    opening: str = ""
    generation: str = ""
    closing: str = ""
    strips: str = ""
    then: Mapping[str, int] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)

    @property
    def strips_left(self) -> bool:
        return self.strips in ("left", "both")

    @property
    def strips_right(self) -> bool:
        return self.strips in ("right", "both")

    def trimmed(self, content: str) -> str:
        """The content as the template writes it."""
        content = content.lstrip() if self.strips_left else content
        return content.rstrip() if self.strips_right else content


@dataclass(frozen=True)
class ChatFormat:
    """How messages become text.

    roles: role → (prefix, suffix). default_system: what comes in front when the first message is not from the
        system; already wrapped in its markers. begin: text before everything (e.g. a BOS marker).
    turns: for templates whose text around a message depends on the messages before it; turns[0] stands for the
        beginning. Where it is given it says all, and roles and default_system are only the nearest simple form.
    thinking_end: the template leaves an assistant's text up to this marker out of the history once a user message
        follows; after_thinking: characters that it then also strips in front of the rest.
    stop: texts that end an assistant message, for models that do not end it themselves.
    exact: for every conversation that was tried, this gives the template's own text. problem: why the template
        could not be taken apart; no role can then be used.
    """

    roles: Mapping[str, tuple[str, str]] = field(
        default_factory=lambda: {
            "system": ("SYSTEM: ", "\n"),
            "user": ("USER: ", "\n"),
            "assistant": ("ASSISTANT: ", "\n"),
        }
    )
    default_system: str = ""
    begin: str = ""
    turns: tuple[Turn, ...] = ()
    thinking_end: str = ""
    after_thinking: str = ""
    stop: tuple[str, ...] = ()
    exact: bool = True
    problem: str = ""

    @cached_property
    def graph(self) -> tuple[Turn, ...]:
        """The turns, whichever form the format is in. graph[0] is the beginning."""
        if self.turns:
            return self.turns
        names = list(self.roles)
        later = {role: len(names) + i for i, role in enumerate(names, 1)}
        first, rest = [], []
        for role, (prefix, suffix) in self.roles.items():
            head = self.begin + ("" if role == "system" else self.default_system) + prefix
            first.append(Turn(role, head, head, suffix, then=later))
            rest.append(Turn(role, prefix, prefix, suffix, then=later))
        return (Turn(then={role: i for i, role in enumerate(names, 1)}), *first, *rest)

    def after(self, index: int, role: str) -> int:
        """Index in ``graph`` of a message of this role after turn ``index``. Raises InvalidRequestError."""
        if self.problem:
            raise InvalidRequestError("role", f"{self.problem}; name another one with chat_template=...")
        turn = self.graph[index]
        if role in turn.then:
            return turn.then[role]
        where = f"after {turn.role!r}" if turn.role else "as the first message"
        reason = f"the chat template has no role {role!r} {where}"
        if not any(role == each.role for each in self.graph):
            reason = f"the chat template has no role {role!r}"
        elif role in turn.refuses:
            reason = f"the chat template takes no {role!r} {where}: {turn.refuses[role]}"
        raise InvalidRequestError("role", f"{reason}; it has: {', '.join(sorted(turn.then)) or 'none'}")

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the template writes it. Raises InvalidRequestError where it refuses a message."""
        last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        text, index = "", 0
        for i, message in enumerate(messages):
            index = self.after(index, message["role"])
            turn, content = self.graph[index], message["content"]
            if turn.role == "assistant" and i < last_user:
                content = content[self.forgotten(content) :]
            text += turn.opening + turn.trimmed(content) + turn.closing
        if add_generation_prompt:
            text += self.graph[self.after(index, "assistant")].generation
        return text

    def forgotten(self, content: str) -> int:
        """How many characters of an assistant's message are left out once a user message follows."""
        if not self.thinking_end or self.thinking_end not in content:
            return 0
        rest = content.rpartition(self.thinking_end)[2]
        return len(content) - len(rest.lstrip(self.after_thinking) if self.after_thinking else rest)


def chained(
    joints: Mapping[tuple[str, str], str],
    closings: Mapping[str, str],
    *,
    begin: str = "",
    generation: Mapping[str, str] | None = None,
    strips: Mapping[tuple[str, str], str] | None = None,
    stop: tuple[str, ...] = (),
) -> ChatFormat:
    """A format in which the text before a message depends on the role before it.

    joints: (role before, or "" at the beginning; role) → opening, for every pair that is allowed. closings: role →
    text after its content. generation: role before → what asks for the assistant's answer, where it is not the
    assistant's opening. strips: the same pairs as of joints → see ``Turn``.
    """
    index = {pair: i for i, pair in enumerate(joints, 1)}
    prompts, strips = generation or {}, strips or {}

    def then(before: str) -> dict[str, int]:
        return {role: i for (left, role), i in index.items() if left == before}

    turns = [Turn(then=then(""))]
    for (before, role), opening in joints.items():
        prompt = prompts.get(before, opening) if role == "assistant" else opening
        turns.append(Turn(role, opening, prompt, closings[role], strips.get((before, role), ""), then(role)))
    roles = {turn.role: (turn.opening.removeprefix(begin), turn.closing) for turn in reversed(turns[1:])}
    return ChatFormat(roles, begin=begin, turns=tuple(turns), stop=stop)
