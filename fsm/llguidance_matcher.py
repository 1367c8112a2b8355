"""The ``Grammar`` and ``Matcher`` over llguidance's parser.

llguidance compiles a grammar into a parser that is copied for each request (a microsecond) and walks the
vocabulary's trie for a mask. It never raises: a failure makes the parser useless for good, so every answer is
followed by a look at its error state, and a failed parser is replaced by a fresh copy that is led to the same
position.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from trellis.errors import ConstraintError
from trellis.fsm.contract import ConstraintKind, MaskRow, Vocabulary
from trellis.fsm.forced import forced_run, tail_of
from trellis.fsm.llguidance_bytes import BytePath, fault
from trellis.fsm.llguidance_tokens import LLTokens

T = TypeVar("T")

_FORCED_BYTES = 1024  # that are looked at in one go


class LLGuidanceGrammar:
    """A ``Grammar``. validated_only, validate: see ``ChecksText``.

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

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self)

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


class LLGuidanceMatcher:
    """A ``Matcher``: a parser, the accepted tokens, and the forced run that is under way at each position."""

    def __init__(self, grammar: LLGuidanceGrammar) -> None:
        self._grammar = grammar
        self._text = grammar.tokens.text
        self._parser = grammar.parser()
        self._output: list[int] = []  # without EOS, which the parser never sees
        self._runs: list[tuple[int, ...] | None] = [None]
        self._data = bytearray()
        self._path: BytePath | None = None
        self._mask: MaskRow | None = None
        self._ended = False

    def fill_mask(self, row: MaskRow) -> bool:
        if self._ended:
            row.fill(0)
        elif run := self._run():
            row.fill(0)
            row.view(np.uint32)[run[0] >> 5] = 1 << (run[0] & 31)
        else:
            np.copyto(row, self._allowed())
        return True

    def accept(self, token_id: int) -> bool:
        if self._ended:
            return False
        if token_id in self._grammar.vocabulary.eos_token_ids:
            self._ended = self.is_accepting()
            return self._ended
        if not 0 <= token_id < len(self._text) or not self._text[token_id]:
            return False
        run = self._run()
        if run and run[0] != token_id:
            return False
        if not self._ask(lambda parser: parser.validate_tokens([token_id])):
            return False
        self._ask(lambda parser: parser.consume_token(token_id))
        self._output.append(token_id)
        self._data += self._text[token_id]
        self._runs.append(run[1:] or None)
        self._mask = None
        return True

    def forced(self) -> list[int]:
        return [] if self._ended else list(self._run())

    def rollback(self, n: int) -> None:
        accepted = len(self._output) + self._ended
        if not 0 <= n <= accepted:
            raise ValueError(f"cannot take back {n} tokens: {accepted} were accepted")
        if n == 0:
            return
        back = n - self._ended
        self._ended = False
        if back == 0:
            return
        del self._data[len(self._data) - sum(len(self._text[token]) for token in self._output[-back:]) :]
        del self._output[-back:], self._runs[-back:]
        self._mask = None
        if not self._parser.rollback(back):
            self._renew()

    def is_accepting(self) -> bool:
        return not self._ended and bool(self._ask(lambda parser: parser.is_accepting()))

    def is_finished(self) -> bool:
        if self._ended:
            return True
        if not self.is_accepting():
            return False
        # The parser notices late that nothing can follow; the mask says so at once.
        allowed = self._allowed().view(np.uint32)
        eos = self._grammar.vocabulary.eos_token_ids
        words = {token >> 5 for token in eos}
        return all(
            int(allowed[word]) == sum(1 << (token & 31) for token in eos if token >> 5 == word)
            for word in words
        ) and np.count_nonzero(allowed) == len(words)

    def _allowed(self) -> MaskRow:
        """int32 [mask_words], kept until the matcher moves."""
        if self._mask is None:
            vocabulary = self._grammar.vocabulary
            mask = np.zeros(vocabulary.mask_words, np.int32)
            accepting = self.is_accepting()
            self._ask(lambda parser: parser.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes))
            bits = mask.view(np.uint32)
            for token in vocabulary.eos_token_ids:
                bit = np.uint32(1 << (token & 31))
                bits[token >> 5] = bits[token >> 5] | bit if accepting else bits[token >> 5] & ~bit
            if not mask.any():
                where = f"output token {len(self._output)}"
                raise ConstraintError(self._grammar.kind, "empty", where, "no token of this model can follow")
            self._mask = mask
        return self._mask

    def _run(self) -> tuple[int, ...]:
        run = self._runs[-1]
        if run is None:
            forced = self._ask(lambda parser: parser.compute_ff_bytes())
            run = self._spelled(forced[:_FORCED_BYTES]) if forced else ()
            self._runs[-1] = run
        return run

    def _spelled(self, forced: bytes) -> tuple[int, ...]:
        """Forced bytes as forced tokens."""
        trie = self._grammar.tokens.trie
        data = bytes(self._data)
        begun = b"".join(self._text[token] for token in tail_of(trie, self._output)) + forced
        forced = forced[: max(len(forced) - _unfinished(begun), 0)]
        if not forced:
            return ()
        if self._path is None:
            self._path = self._grammar.path()
        path, self._path = self._path, None  # a path that failed is of no further use
        if not path.lead(data + forced):
            return ()
        run = forced_run(trie, self._output, forced, path.spans, path.following())
        self._path = path
        return run

    def _ask(self, ask: Callable[[Any], T]) -> T:
        """Ask the parser; if it fails, a fresh one once more, as its tables may just have been full."""
        answer = ask(self._parser)
        if not self._parser.is_error():
            return answer
        self._renew()
        answer = ask(self._parser)
        if self._parser.is_error():
            error = fault(self._grammar.kind, self._parser)
            self._renew()
            raise error
        return answer

    def _renew(self) -> None:
        """A fresh parser at the same position."""
        self._parser = self._grammar.parser()
        self._parser.consume_tokens(self._output)


def _unfinished(data: bytes) -> int:
    """Bytes at the end that are the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])
