"""What the chat and completions APIs answer, into the language's own structures. Answers of the official client are
not checked by it: whatever the server sent is looked at here, and a wrong answer is a BackendError."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from trellis.errors import BackendError
from trellis.frontend.backends.base import Completion, Counts, GenerateRequest
from trellis.frontend.backends.errors import raise_for_finish
from trellis.frontend.backends.structured import StructuredOutput, check_choice

_ID = "token_id:"
_WRONG = (AttributeError, IndexError, KeyError, TypeError, ValueError)


@dataclass(frozen=True)
class Token:
    """top: the most likely tokens in its place."""

    spelled: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """New output of one choice. tokens: as far as log-probabilities came. offsets: where they begin in the text."""

    text: str = ""
    finish_reason: str | None = None
    matched: str | int | None = None
    tokens: tuple[Token, ...] = ()
    offsets: tuple[int, ...] = ()


@contextlib.contextmanager
def reading(api: str) -> Iterator[None]:
    """BackendError where an answer has not the parts that are read inside."""
    try:
        yield
    except _WRONG as error:
        raise BackendError(
            f"{api}: the answer is not one of this API: {type(error).__name__}: {error}"
        ) from None


def chat_piece(choice: Any, api: str) -> Piece:
    """A choice of a chat completion or of one of its chunks."""
    message = getattr(choice, "delta", None) or getattr(choice, "message", None)
    refusal = getattr(message, "refusal", None)
    if refusal:
        raise BackendError(f"{api}: the model refused to answer: {refusal}")
    content = getattr(getattr(choice, "logprobs", None), "content", None) or ()
    tokens = tuple(
        Token(
            each.token,
            _logprob(each.logprob),
            tuple((top.token, _logprob(top.logprob)) for top in each.top_logprobs or ()),
        )
        for each in content
    )
    return _piece(choice, getattr(message, "content", None), tokens, ())


def completion_piece(choice: Any) -> Piece:
    """A choice of a text completion or of one of its chunks."""
    given = getattr(choice, "logprobs", None)
    tokens: tuple[Token, ...] = ()
    offsets: tuple[int, ...] = ()
    if given is not None and given.tokens:
        tops = given.top_logprobs or [None] * len(given.tokens)
        tokens = tuple(
            Token(token, _logprob(value), tuple((name, _logprob(one)) for name, one in (top or {}).items()))
            for token, value, top in zip(given.tokens, given.token_logprobs, tops, strict=True)
        )
        offsets = tuple(given.text_offset or ())
    return _piece(choice, choice.text, tokens, offsets)


def _piece(choice: Any, text: Any, tokens: tuple[Token, ...], offsets: tuple[int, ...]) -> Piece:
    if not isinstance(text, (str, type(None))):
        raise TypeError(f"the text is {text!r:.100}")
    matched = getattr(choice, "matched_stop", None)  # of Trellis; stop_reason of vLLM
    matched = getattr(choice, "stop_reason", None) if matched is None else matched
    matched = matched if isinstance(matched, (str, int)) else None
    return Piece(text or "", choice.finish_reason, matched, tokens, offsets)


def counts_of(usage: Any) -> Counts:
    """usage: of an answer; None where an API gives none."""
    if usage is None:
        return Counts()
    prompt, completion = _count(usage.prompt_tokens), _count(usage.completion_tokens)
    cached = _count(getattr(getattr(usage, "prompt_tokens_details", None), "cached_tokens", None))
    details = getattr(usage, "completion_tokens_details", None)
    forced = _count(getattr(details, "forced_tokens", None))
    return Counts(
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        sampled_tokens=completion - forced,
        forced_tokens=forced,
        forward_passes=_count(getattr(details, "forward_passes", None)),
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _logprob(value: Any) -> float:
    return -math.inf if value is None else float(value)


@dataclass
class Answer:
    """An answer to ``request``, piece by piece. output: the form in which its text was asked for."""

    request: GenerateRequest
    api: str
    output: StructuredOutput | None = None
    token_ids: bool = False
    _pieces: list[Piece] = field(default_factory=list)

    def add(self, piece: Piece) -> str:
        """Returns the text that can be shown already."""
        self._pieces.append(piece)
        return "" if self.output is not None and self.output.wrapped else piece.text

    def complete(self, usage: Any) -> Completion:
        """Raises BackendError for an answer that did not end, or ended by something that is no end of a text."""
        text = "".join(piece.text for piece in self._pieces)
        finish = self._finish()
        matched = next((piece.matched for piece in reversed(self._pieces) if piece.matched is not None), None)
        if self.output is not None:
            text = self.output.text(text)
        check_choice(self.request.constraint, text, finish, self.api)
        tokens = [token for piece in self._pieces for token in piece.tokens]
        if self.request.return_logprob and text and not tokens:
            raise BackendError(f"{self.api} gave no log-probabilities, though they were asked for")
        wants_top = self.request.top_logprobs_num > 0
        strict = self.output is None or self.output.strict
        return Completion(
            text=text,
            token_ids=tuple(token_id(token.spelled) for token in tokens) if self.token_ids else (),
            finish_reason=finish,
            matched=matched,
            counts=counts_of(usage),
            logprobs=tuple(token.logprob for token in tokens) if self.request.return_logprob else None,
            top_logprobs=tuple(_top(token) for token in tokens) if wants_top else None,
            grammar_engine=self.api if self.request.constraint is not None else None,
            validated_only=() if strict else ("the whole schema: strict=False lets the API only try",),
        )

    def token_texts(self) -> tuple[str, ...] | None:
        """The text, cut where its tokens begin; None if the API did not say where that is."""
        text = "".join(piece.text for piece in self._pieces)
        offsets = [offset for piece in self._pieces for offset in piece.offsets]
        places = [offset - offsets[0] for offset in offsets]
        if not text:
            return ()
        if not places or any(b < a for a, b in pairwise(places)) or places[-1] > len(text):
            return None
        return tuple(text[start:end] for start, end in pairwise([*places, len(text)]))

    def _finish(self) -> str:
        reason = next((piece.finish_reason for piece in reversed(self._pieces) if piece.finish_reason), None)
        if reason is None:
            raise BackendError(f"{self.api}: the answer ended before it was complete")
        raise_for_finish(reason, f"{self.api}: the server ended the request early", None)
        if reason == "content_filter":
            raise BackendError(f"{self.api}: the content filter of the API ended the answer")
        if reason not in ("stop", "length"):
            raise BackendError(f"{self.api}: the answer ended with {reason!r}, which is no end of a text")
        return reason


def _top(token: Token) -> tuple[tuple[int, float], ...]:
    return tuple((token_id(spelled), logprob) for spelled, logprob in token.top)


def token_id(spelled: str) -> int:
    number = spelled.removeprefix(_ID)
    if number == spelled or not number.isdecimal():
        raise ValueError(f"a token is called {spelled!r:.50}, not {_ID}N as was asked")
    return int(number)
