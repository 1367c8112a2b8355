"""A role that has begun: which text of the chat template is still to come, and which blanks the template would strip.

What a program writes is shown as the template shows it. What the model writes stays as it wrote it, to the token.
"""

from __future__ import annotations

from dataclasses import dataclass

from trellis.chat_format import ChatFormat, Turn


@dataclass
class OpenTurn:
    """turn: chat.graph[index]. opening, generation: what is still to be said before content that the program gives, and
    before content that the model writes; "" once there is content. held: blanks at the end of what was written, which
    the template strips unless more follows. dropped: blanks at its beginning that were not said. empty: no content was
    said."""

    chat: ChatFormat
    index: int
    opening: str
    generation: str
    held: str = ""
    dropped: str = ""
    empty: bool = True

    @property
    def turn(self) -> Turn:
        return self.chat.graph[self.index]

    def written(self, text: str) -> tuple[str, str]:
        """The program writes ``text``: (the template's text that comes before it, the part of it that is said now)."""
        text = self.held + text
        self.held = ""
        if self.empty and self.turn.strips_left:
            rest = text.lstrip()
            self.dropped += text[: len(text) - len(rest)]
            text = rest
        if self.turn.strips_right:
            said = text.rstrip()
            text, self.held = said, text[len(said) :]
        if not text:
            return "", ""
        return self._first(self.opening), text

    def asked(self) -> tuple[str, str]:
        """The model goes on: (the template's text before that, blanks that were held back)."""
        head = self._first(self.opening if self.held else self.generation)
        held, self.held = self.held, ""
        return head, held

    def ended(self) -> tuple[str, str]:
        """The role ends: (the template's text before its content, if there was none; and after it)."""
        return self._first(self.opening), self.turn.closing

    def _first(self, head: str) -> str:
        if not self.empty:
            return ""
        self.empty = False
        return head


def open_turn(chat: ChatFormat, before: int, role: str, at_start: bool) -> tuple[str, OpenTurn]:
    """Begin a role: (the text that comes first whatever the content, the role).

    before: index of the turn of the last message, 0 if there is none. at_start: nothing at all was said before.
    Raises InvalidRequestError where the template has no such message.
    """
    index = chat.after(before, role)
    turn = chat.graph[index]
    opening, generation = turn.opening, turn.generation
    if before == 0 and not at_start:
        opening, generation = opening.removeprefix(chat.begin), generation.removeprefix(chat.begin)
    common = 0
    while common < min(len(opening), len(generation)) and opening[common] == generation[common]:
        common += 1
    return opening[:common], OpenTurn(chat, index, opening[common:], generation[common:])
