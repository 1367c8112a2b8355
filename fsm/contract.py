"""The contract of every constraint engine: a compiled ``Grammar`` shared by requests, a ``Matcher`` each.

A ``ConstraintSpec`` says what the user wants; ``compile_grammar`` (see ``trellis.fsm``) turns it into an
immutable ``Grammar``; each request walks that with its own ``Matcher``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

ConstraintKind = Literal["regex", "choices", "schema", "grammar"]
Spacing = Literal["spaced", "compact", "any"]
MaskRow = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ConstraintSpec:
    """What the user gave, as plain text, so that it can be hashed, sent and cached.

    source: the regex; a JSON array of strings for ``choices``; the JSON schema; the grammar text.
    spacing, strict: for ``schema`` only. ``spaced`` writes ``", "`` and ``": "`` between the parts of JSON,
        ``compact`` nothing, ``any`` up to 8 blanks where JSON allows them. strict: refuse what cannot be
        enforced; if False, it is only validated in the finished text.
    """

    kind: ConstraintKind
    source: str
    spacing: Spacing = "spaced"
    strict: bool = True

    @staticmethod
    def regex(pattern: str) -> ConstraintSpec:
        return ConstraintSpec("regex", pattern)

    @staticmethod
    def choices(options: Sequence[str]) -> ConstraintSpec:
        return ConstraintSpec("choices", json.dumps(list(options), ensure_ascii=False))

    @staticmethod
    def schema(
        schema: Mapping[str, Any] | bool | str, spacing: Spacing = "spaced", strict: bool = True
    ) -> ConstraintSpec:
        """schema: a JSON schema as a dict, or its JSON text."""
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        return ConstraintSpec("schema", text, spacing, strict)

    @staticmethod
    def grammar(text: str) -> ConstraintSpec:
        """text: a context-free grammar."""
        return ConstraintSpec("grammar", text)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokenizer as constraints see it.

    token_bytes: the bytes each token id stands for; ``b""`` for special and unused ids, which are
        never part of a constrained text.
    size: width of a logits row; at least ``len(token_bytes)``.
    eos_token_ids: ids that end a text; allowed exactly where the grammar accepts.
    encode: text to token ids, without special tokens; the model's canonical spelling.
    fingerprint: equal for equal vocabularies; part of every grammar cache key.
    """

    token_bytes: Sequence[bytes]
    size: int
    eos_token_ids: frozenset[int]
    encode: Callable[[str], list[int]] = field(repr=False)
    fingerprint: str

    @property
    def mask_words(self) -> int:
        """int32 words in a mask row: one bit a token, little-endian within a word."""
        return (self.size + 31) // 32


@runtime_checkable
class Matcher(Protocol):
    """One request's position in a grammar. Its state is a function of the accepted tokens.

    Grammars are built while they are used, so every method but ``rollback`` may raise ConstraintError
    (``limit`` or ``timeout``) when going on would cost more than the limits allow. The matcher has then not
    moved; the request ends with finish reason ``error`` and keeps its text so far, other requests go on.
    """

    def fill_mask(self, row: MaskRow) -> bool:
        """Write the allowed tokens into ``row`` (int32 [mask_words], one bit a token, all words written).

        Returns False if everything is allowed (the row is then left as it was). At a forced position the
        mask holds the one forced token, so that ids are the same with and without jump-forward.
        """

    def accept(self, token_id: int) -> bool:
        """Advance by one token. False: the token is not allowed and the matcher did not move."""

    def forced(self) -> list[int]:
        """The tokens that have no alternative from here (may be empty). Does not move the matcher."""

    def draft(self) -> list[int]:
        """A guess at the tokens that will be chosen from here, for the model to check in one forward pass.

        It spells forced bytes whose end may yet be spelled together with what follows, and which are
        therefore not forced tokens. Empty where tokens are forced, and where nothing is known. Does not move
        the matcher, which need not allow all of them.
        """

    def rollback(self, n: int) -> None:
        """Take back the last n accepted tokens. ValueError if fewer were accepted."""

    def is_accepting(self) -> bool:
        """EOS may come now."""

    def is_finished(self) -> bool:
        """Only EOS may come: the request can finish without a forward pass."""


@runtime_checkable
class Grammar(Protocol):
    """A compiled constraint: its language is fixed, it is thread-safe, cached by content and vocabulary.

    engine: name of the engine that made it. warnings: what the user should know, one sentence each.
    """

    engine: str
    warnings: list[str]

    @property
    def nbytes(self) -> int:
        """Memory it holds now; grows while automata and masks are built on demand."""

    def matcher(self) -> Matcher:
        """A new matcher at the start; microseconds."""

    def accepts(self, text: str | bytes) -> bool:
        """Does the whole text satisfy the constraint? For tests, the command line and final checks."""


@runtime_checkable
class BeginsInside(Protocol):
    """A ``Grammar`` whose text may begin inside a token: the token's first bytes stand before the text.

    That is what healing a prompt's last token asks for (see ``trellis.fsm.healing``). All methods may raise
    ConstraintError as a ``Matcher`` does.
    """

    def spanning(self, data: bytes) -> npt.NDArray[np.int64]:
        """Ids of the tokens that begin with ``data`` and go on with what the text may begin with."""

    def joint_run(self, output: Sequence[int], data: bytes) -> tuple[int, ...]:
        """The tokens that have no alternative after ``output``, if ``data`` comes first and then the text.

        data: whole characters, counted from the output's end (the first may complete one that it began).
        """

    def begun(self, output: Sequence[int], data: bytes, run: Sequence[int] = ()) -> Matcher | None:
        """A new matcher whose text has begun with ``data``, the last bytes of ``output``; None: no text does.

        output: the tokens before, as far back as their spelling matters. run: the forced run under way, if
        one is known.
        """


@runtime_checkable
class ChecksText(Protocol):
    """A ``Grammar`` that knows more of its constraint than its masks enforce.

    validated_only: what the masks leave open, e.g. ``uniqueItems at #/properties/tags``; empty where all is
        enforced.
    """

    validated_only: list[str]

    def validate(self, text: str) -> str | None:
        """What is wrong with a finished text, or None if it satisfies the constraint as the user wrote it."""
