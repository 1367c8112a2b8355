"""What a state has said so far: its text, the tokens that spelled it, and its messages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trellis.errors import BackendError
from trellis.frontend.backends.base import ChatFormat, Completion, Segment
from trellis.frontend.backends.conversation import Conversation
from trellis.frontend.backends.surplus import Surplus
from trellis.frontend.chat import OpenTurn, open_turn

if TYPE_CHECKING:
    from trellis.frontend.variable import Variable


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text; token_ids when the model produced it, so that the next prompt carries those very tokens.

    healed: text before this piece that the token ids spell again. written: a program wrote the text, so that it may
    end anywhere; text of roles and of choices ends where it should. hidden: so many characters at its beginning are
    left out of prompts from now on, as the chat template leaves them out of the history. passing: the template's text
    that asks for an answer, which is not in the history either. source: the variable that the text is of.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    healed: str = ""
    written: bool = False
    hidden: int = 0
    passing: bool = False
    source: Variable | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """pieces[start:end] is its content. turn: index of its turn in the chat format."""

    role: str
    start: int
    end: int
    turn: int = 0


@dataclass
class _Prompt:
    """The segments of the first ``used`` pieces, but for the texts at their end, so that a prompt that grows is not made
    from its beginning each time."""

    used: int = 0
    segments: list[Segment] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        before = "".join(self.texts) if piece.token_ids else ""
        if not piece.token_ids or piece.hidden or not before.endswith(piece.healed):
            self.texts.append(piece.text[piece.hidden :])
            return
        self.texts.clear()
        if before := before.removesuffix(piece.healed):
            self.segments.append(before)
        if self.segments and isinstance(self.segments[-1], tuple):
            self.segments[-1] = self.segments[-1] + piece.token_ids
        else:
            self.segments.append(piece.token_ids)

    def copy(self) -> _Prompt:
        return _Prompt(self.used, list(self.segments), list(self.texts))


@dataclass
class Transcript:
    """Pieces in order. open_role: the role that has begun and where its content starts.

    surplus: what an API wrote beyond the last gen, as far as nothing else was said since.
    """

    pieces: list[Piece] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    open_role: tuple[str, int] | None = None
    open_turn: OpenTurn | None = None
    surplus: Surplus | None = None
    _prompt: _Prompt = field(default_factory=lambda: _Prompt(), repr=False, compare=False)

    def add_text(
        self, text: str, written: bool = False, source: Variable | None = None, passing: bool = False
    ) -> None:
        if text:
            self.pieces.append(Piece(text, written=written, source=source, passing=passing))
            self.surplus = self.surplus and self.surplus.after(text)

    def write(self, text: str) -> str:
        """Text of the program; returns what this added, which in a role is what the chat template makes of it."""
        if self.open_turn is None:
            self.add_text(text, written=True)
            return text
        head, text = self.open_turn.written(text)
        self._begin_content(head)
        self.add_text(text, written=True)
        return head + text

    def before_answer(self) -> str:
        """The model goes on from here; returns the text that this added."""
        if self.open_turn is None:
            return ""
        passing = not self.open_turn.opening and not self.open_turn.held
        head, held = self.open_turn.asked()
        self._begin_content(head, passing)
        self.add_text(held, written=True)
        return head + held

    def before_fork(self) -> str:
        """Branches go on from here; returns the text that this added: blanks are then no longer at an end."""
        if self.open_turn is None:
            return ""
        held, self.open_turn.held, self.open_turn.dropped = self.open_turn.held, "", ""
        self.add_text(held, written=True)
        return held

    def _begin_content(self, head: str, passing: bool = False) -> None:
        if head and self.open_role is not None:
            self.add_text(head, passing=passing)
            self.open_role = (self.open_role[0], len(self.pieces))

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the role that is open."""
        return self.open_turn.chat.stop if self.open_turn else ()

    @property
    def ends_in_written_text(self) -> bool:
        return bool(self.pieces) and self.pieces[-1].written

    def add_completion(self, completion: Completion, source: Variable | None = None) -> None:
        """Go on from the completion's own tokens; what a cut inside a token left over follows as text.

        Raises BackendError if the completion spells more of the text before it again than there is.
        """
        kept = completion.token_ids[: completion.kept_tokens]
        if not kept:
            self.add_text(completion.text, source=source)
            self.surplus = completion.surplus
            return
        self.surplus = None
        head = completion.text.removesuffix(completion.tail_text)
        healed = self._text_before(completion.healed_characters)
        self.pieces.append(Piece(head, kept, healed, source=source))
        self.add_text(completion.tail_text, source=source)

    def _text_before(self, count: int) -> str:
        """The last ``count`` characters of what was said."""
        found = ""
        for piece in reversed(self.pieces):
            if len(found) >= count:
                break
            found = piece.text + found
        if len(found) < count:
            raise BackendError(
                f"the answer says that it wrote {count} characters of the prompt again, but it has {len(found)}"
            )
        return found[len(found) - count :]

    def begin_role(self, role: str, chat: ChatFormat) -> str:
        """Returns the text that this added."""
        before = self.messages[-1].turn if self.messages else 0
        text, self.open_turn = open_turn(chat, before, role, at_start=not self.pieces)
        self._forget(chat, role)
        self.add_text(text)
        self.open_role = (role, len(self.pieces))
        return text

    def _forget(self, chat: ChatFormat, role: str) -> None:
        """Leave out of prompts what the template leaves out of the history, now that a message follows."""
        for message in reversed(self.messages):
            before = message.start - 1
            if before >= 0 and self.pieces[before].passing:
                self._hide(before, len(self.pieces[before].text))
            if message.role == "user":
                break
            if role == "user" and message.role == "assistant":
                left_out = chat.forgotten(self.text(message.start, message.end))
                for i in range(message.start, message.end):
                    hidden = min(left_out, len(self.pieces[i].text))
                    left_out -= hidden
                    self._hide(i, hidden)

    def _hide(self, index: int, hidden: int) -> None:
        if self.pieces[index].hidden != hidden:
            self.pieces[index] = replace(self.pieces[index], hidden=hidden)
            self._prompt = _Prompt()  # to be made from its beginning

    def end_role(self) -> str:
        """Returns the text that this added."""
        assert self.open_role is not None, "roles are checked when they are appended"
        assert self.open_turn is not None
        head, text = self.open_turn.ended()
        self._begin_content(head)
        role, start = self.open_role
        self.messages.append(Message(role, start, len(self.pieces), self.open_turn.index))
        self.open_role = self.open_turn = None
        self.add_text(text)
        return head + text

    def prompt(self) -> tuple[Segment, ...]:
        """Segments for a backend: adjacent texts joined, adjacent token runs joined.

        Text that tokens spell again is left out. A branch that was appended elsewhere may follow another text than
        the one its tokens begin with; it then goes as text.
        """
        made = self._prompt
        for index in range(made.used, len(self.pieces)):
            made.add(self.pieces[index])
        made.used = len(self.pieces)
        made.texts[:] = ["".join(made.texts)] if made.texts else []
        return (*made.segments, *made.texts)

    def text(self, start: int = 0, end: int | None = None) -> str:
        return "".join(piece.text for piece in self.pieces[start:end])

    def conversation(self) -> Conversation:
        """All of it as messages, for a backend that takes these."""
        role, start = self.open_role or (None, len(self.pieces))
        inside = [(m.start, m.end) for m in self.messages]
        loose: list[str] = []
        at = 0
        for begin, end in [*inside, (start, len(self.pieces))]:
            loose += [piece.text for piece in self.pieces[at:begin] if piece.written]
            at = end
        messages = tuple((m.role, self.text(m.start, m.end)) for m in self.messages)
        return Conversation(messages, role, self.text(start), "".join(loose))

    def as_messages(self) -> list[dict[str, str]]:
        """The messages whose role has ended."""
        return [{"role": m.role, "content": self.text(m.start, m.end)} for m in self.messages]

    def copy(self) -> Transcript:
        # Without the surplus: branches that took the same text would not be drawn each on its own.
        opened = replace(self.open_turn) if self.open_turn else None
        return Transcript(
            list(self.pieces), list(self.messages), self.open_role, opened, _prompt=self._prompt.copy()
        )

    def splice(self, other: Transcript, pieces: int, messages: int, chat: ChatFormat | None = None) -> str:
        """Append what ``other`` said after its first ``pieces`` pieces and ``messages`` messages.

        Both must have the same role open (or none). chat: the template that its messages are of. Returns the text that
        this added. Raises InvalidRequestError if the template forbids those messages after the last one here.
        """
        at = self.messages[-1].turn if self.messages else 0
        turns = [at := chat.after(at, m.role) for m in other.messages[messages:]] if chat else []
        self.surplus = None
        between = ""
        goes_on = len(other.messages) == messages  # in the message that was open at the fork
        if self.open_turn and other.open_turn and goes_on and not self.open_turn.empty:
            between = self.open_turn.held + other.open_turn.dropped  # no longer at an end of the message
            self.add_text(between, written=True)
        shift = len(self.pieces) - pieces
        if other.open_role is not None and other.open_role[1] > pieces:
            self.open_role = (other.open_role[0], other.open_role[1] + shift)
        self.open_turn = replace(other.open_turn) if other.open_turn else None
        self.pieces.extend(other.pieces[pieces:])
        self.messages.extend(
            replace(m, start=m.start + shift, end=m.end + shift, turn=turn)
            for m, turn in zip(other.messages[messages:], turns, strict=True)
        )
        return between + other.text(pieces)
