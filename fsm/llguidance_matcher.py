"""The ``Grammar`` and ``Matcher`` over llguidance's parser.

llguidance compiles a grammar into a parser that is copied for each request (a microsecond) and walks the
vocabulary's trie for a mask. It never raises: a failure makes the parser useless for good, so every answer is
followed by a look at its error state, and a failed parser is replaced by a fresh copy that is led to the same
position.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from trellis.errors import ConstraintError
from trellis.fsm.contract import ConstraintKind, MaskRow, Vocabulary
from trellis.fsm.flat_trie import LongArray
from trellis.fsm.forced import forced_run, held_back, tail_of
from trellis.fsm.llguidance_bytes import BytePath, fault
from trellis.fsm.llguidance_tokens import LLTokens
from trellis.fsm.parser_matcher import ParserMatcher
from trellis.fsm.spanning import KeptSpans, spanning_tokens

T = TypeVar("T")

_FORCED_BYTES = 1024  # that are looked at in one go


class LLGuidanceGrammar:
    """A ``Grammar`` that ``BeginsInside``. validated_only, validate: see ``ChecksText``.

    parser: an ``LLMatcher`` at the start, never moved; bytewise: the same over single bytes.
    whole: makes one over single bytes that knows nothing of what the vocabulary can write.
    """

    engine = "llguidance"

    def __init__(
        self,
        kind: ConstraintKind,
        parser: Any,
        bytewise: Any,
        whole: Callable[[], Any],
        vocabulary: Vocabulary,
        tokens: LLTokens,
        nbytes: int,
        warnings: list[str],
        validated_only: list[str],
        check: Callable[[str], str | None],
    ) -> None:
        self.kind = kind
        self.warnings = warnings
        self.validated_only = validated_only
        self.vocabulary = vocabulary
        self.tokens = tokens
        self._parser = parser
        self._bytewise = bytewise
        self._make_whole = whole
        self._whole: Any = None
        self._nbytes = nbytes
        self._check = check
        self._lock = threading.Lock()
        self._spans = KeptSpans()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self)

    def spanning(self, data: bytes) -> LongArray:
        trie, parser = self.tokens.trie, self.parser()

        def begins(rest: bytes) -> bool:
            spelled = trie.spell(rest)
            return spelled is not None and bool(parser.validate_tokens(spelled) == len(spelled))

        def make() -> LongArray:
            found = spanning_tokens(trie, data, LLGuidanceMatcher(self).allowed(), begins)
            if parser.is_error():
                raise fault(self.kind, parser)
            return found

        return self._spans.get(data, make)

    def joint_run(self, output: Sequence[int], data: bytes) -> tuple[int, ...]:
        parser = self.parser()
        forced: bytes = parser.compute_ff_bytes()[:_FORCED_BYTES]
        if parser.is_error():
            raise fault(self.kind, parser)
        forced = forced[: len(forced) - _unfinished(forced)]
        path = self.path()
        if not path.lead(forced):
            return ()
        return forced_run(self.tokens.trie, output, data + forced, path.spans, path.following())

    def begun(self, output: Sequence[int], data: bytes, run: Sequence[int] = ()) -> LLGuidanceMatcher | None:
        spelled = self.tokens.trie.spell(data)
        if spelled is None:
            return None
        parser = self.parser()
        if parser.validate_tokens(spelled) < len(spelled):
            if parser.is_error():
                raise fault(self.kind, parser)
            return None
        return LLGuidanceMatcher(self, output, data, spelled, run)

    def parser(self) -> Any:
        """A copy of the parser, at the start."""
        return self._parser.deep_copy()

    def path(self) -> BytePath:
        return BytePath(self.kind, self._bytewise.deep_copy(), self.tokens.trie)

    def accepts(self, text: str | bytes) -> bool:
        try:
            data = text.encode() if isinstance(text, str) else text
            text_of_data = data.decode()
        except UnicodeError:
            return False  # a lone surrogate, or bytes that are not UTF-8
        with self._lock:
            if self._whole is None:
                self._whole = self._make_whole()
            path = BytePath(self.kind, self._whole.deep_copy(), self.tokens.trie)
        return path.lead(data) and path.accepting() and self._check(text_of_data) is None

    def validate(self, text: str) -> str | None:
        return self._check(text)


class LLGuidanceMatcher(ParserMatcher):
    """A ``Matcher``. The text so far leads a second parser, over bytes, which spells forced runs.

    data: what the text has begun with. spelled: tokens that stand for it.
    """

    def __init__(
        self,
        grammar: LLGuidanceGrammar,
        before: Sequence[int] = (),
        data: bytes = b"",
        spelled: Sequence[int] = (),
        run: Sequence[int] = (),
    ) -> None:
        super().__init__(grammar.vocabulary, grammar.tokens.text, before, run)
        self._grammar = grammar
        self._spelled_start = list(spelled)
        self._renew([])
        self._data = bytearray(data)
        self._path: BytePath | None = None

    def _consume(self, token_id: int) -> bool:
        if not self._ask(lambda parser: parser.validate_tokens([token_id])):
            return False
        self._ask(lambda parser: parser.consume_token(token_id))
        self._data += self._text[token_id]
        return True

    def _take_back(self, n: int) -> None:
        del self._data[len(self._data) - sum(len(self._text[token]) for token in self._output[-n:]) :]
        if not self._parser.rollback(n):
            self._renew(self._output[:-n])

    def _complete(self) -> bool:
        return bool(self._ask(lambda parser: parser.is_accepting()))

    def _compute_mask(self) -> MaskRow:
        mask = np.zeros(self._vocabulary.mask_words, np.int32)
        accepting = self.is_accepting()
        self._ask(lambda parser: parser.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes))
        bits = mask.view(np.uint32)
        for token in self._vocabulary.eos_token_ids:
            bit = np.uint32(1 << (token & 31))
            bits[token >> 5] = bits[token >> 5] | bit if accepting else bits[token >> 5] & ~bit
        if not mask.any():
            where = f"output token {len(self._output)}"
            raise ConstraintError(self._grammar.kind, "empty", where, "no token of this model can follow")
        return mask

    def draft(self) -> list[int]:
        if self._ended or self._run():
            return []
        forced = self._forced_bytes()
        trie = self._grammar.tokens.trie
        return list(held_back(trie, [*self._before, *self._output], forced)) if forced else []

    def _forced_bytes(self) -> bytes:
        """The bytes that must follow, as far as they are whole characters together with the output."""
        forced: bytes = self._ask(lambda parser: parser.compute_ff_bytes())[:_FORCED_BYTES]
        if not forced:
            return b""
        tail = tail_of(self._grammar.tokens.trie, [*self._before, *self._output])
        begun = b"".join(self._text[token] for token in tail) + forced
        return forced[: max(len(forced) - _unfinished(begun), 0)]

    def _forced_run(self) -> tuple[int, ...]:
        forced = self._forced_bytes()
        if not forced:
            return ()
        trie = self._grammar.tokens.trie
        data = bytes(self._data)
        output = [*self._before, *self._output]
        if self._path is None:
            self._path = self._grammar.path()
        path, self._path = self._path, None  # a path that failed is of no further use
        if not path.lead(data + forced):
            return ()
        run = forced_run(trie, output, forced, path.spans, path.following())
        self._path = path
        return run

    def _ask(self, ask: Callable[[Any], T]) -> T:
        """Ask the parser; if it fails, a fresh one once more, as its tables may just have been full."""
        answer = ask(self._parser)
        if not self._parser.is_error():
            return answer
        self._renew(self._output)
        answer = ask(self._parser)
        if self._parser.is_error():
            error = fault(self._grammar.kind, self._parser)
            self._renew(self._output)
            raise error
        return answer

    def _renew(self, output: list[int]) -> None:
        """A fresh parser at the position after these tokens."""
        self._parser = self._grammar.parser()
        self._parser.consume_tokens([*self._spelled_start, *output])


def _unfinished(data: bytes) -> int:
    """Bytes at the end that are the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])
