"""What a state has said so far: its text, the tokens that spelled it, and its messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from trellis.errors import BackendError
from trellis.frontend.backends.base import ChatFormat, Completion, Segment
from trellis.frontend.chat import closing, opening


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text; token_ids when the model produced it, so that the next prompt carries those very tokens.

    healed: text before this piece that the token ids spell again. written: a program wrote the text, so that it may
    end anywhere; text of roles and of choices ends where it should.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    healed: str = ""
    written: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """pieces[start:end] is its content."""

    role: str
    start: int
    end: int


@dataclass
class Transcript:
    """Pieces in order. open_role: the role that has begun and where its content starts."""

    pieces: list[Piece] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    open_role: tuple[str, int] | None = None

    def add_text(self, text: str, written: bool = False) -> None:
        if text:
            self.pieces.append(Piece(text, written=written))

    @property
    def ends_in_written_text(self) -> bool:
        return bool(self.pieces) and self.pieces[-1].written

    def add_completion(self, completion: Completion) -> None:
        """Go on from the completion's own tokens; what a cut inside a token left over follows as text.

        Raises BackendError if the completion spells more of the text before it again than there is.
        """
        kept = completion.token_ids[: completion.kept_tokens]
        if not kept:
            self.add_text(completion.text)
            return
        head = completion.text.removesuffix(completion.tail_text)
        self.pieces.append(Piece(head, kept, self._text_before(completion.healed_characters)))
        self.add_text(completion.tail_text)

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
        text = opening(chat, role, first=not self.messages, at_start=not self.pieces)
        self.add_text(text)
        self.open_role = (role, len(self.pieces))
        return text

    def end_role(self, chat: ChatFormat) -> str:
        """Returns the text that this added."""
        assert self.open_role is not None, "roles are checked when they are appended"
        role, start = self.open_role
        self.messages.append(Message(role, start, len(self.pieces)))
        self.open_role = None
        text = closing(chat, role)
        self.add_text(text)
        return text

    def prompt(self) -> tuple[Segment, ...]:
        """Segments for a backend: adjacent texts joined, adjacent token runs joined.

        Text that tokens spell again is left out. A branch that was appended elsewhere may follow another text than
        the one its tokens begin with; it then goes as text.
        """
        segments: list[Segment] = []
        texts: list[str] = []
        for piece in self.pieces:
            before = "".join(texts) if piece.token_ids else ""
            if not piece.token_ids or not before.endswith(piece.healed):
                texts.append(piece.text)
                continue
            texts = []
            if before := before.removesuffix(piece.healed):
                segments.append(before)
            if segments and isinstance(segments[-1], tuple):
                segments[-1] = segments[-1] + piece.token_ids
            else:
                segments.append(piece.token_ids)
        if texts:
            segments.append("".join(texts))
        return tuple(segments)

    def text(self, start: int = 0, end: int | None = None) -> str:
        return "".join(piece.text for piece in self.pieces[start:end])

    def as_messages(self) -> list[dict[str, str]]:
        """The messages whose role has ended."""
        return [{"role": m.role, "content": self.text(m.start, m.end)} for m in self.messages]

    def copy(self) -> Transcript:
        return Transcript(list(self.pieces), list(self.messages), self.open_role)

    def splice(self, other: Transcript, pieces: int, messages: int) -> str:
        """Append what ``other`` said after its first ``pieces`` pieces and ``messages`` messages.

        Both must have the same role open (or none). Returns the text that this added.
        """
        shift = len(self.pieces) - pieces
        self.pieces.extend(other.pieces[pieces:])
        self.messages.extend(
            Message(m.role, m.start + shift, m.end + shift) for m in other.messages[messages:]
        )
        return other.text(pieces)
