"""The ``Grammar`` and ``Matcher`` over xgrammar's parser.

The parser walks bytes (an Earley parser with masks of the vocabulary worked out at compile time). It never
sees EOS: whether the text may end is a question of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from trellis.errors import ConstraintError
from trellis.fsm.contract import MaskRow, Vocabulary
from trellis.fsm.forced import forced_run, kind_of, whole_characters
from trellis.fsm.limits import Budget, Limits
from trellis.fsm.trie import TokenTrie

_CHUNK = 32  # bytes that are parsed between two looks at the clock


class XGrammarGrammar:
    """A ``Grammar``.

    compiled: for the vocabulary's tokens. whole: makes the same grammar over all characters, without tokens.
    trie: of the tokens that the grammar was compiled for.
    """

    engine = "xgrammar"

    def __init__(
        self, compiled: Any, whole: Callable[[], Any], trie: TokenTrie, limits: Limits, warnings: list[str]
    ) -> None:
        self.compiled = compiled
        self.trie = trie
        self.limits = limits
        self.warnings = warnings
        self._make_whole = whole
        self._whole: Any = None
        self._nbytes = int(compiled.memory_size_bytes)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def vocabulary(self) -> Vocabulary:
        return self.trie.vocabulary

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self)

    def parser(self) -> Any:
        return _parser(self.compiled)

    def accepts(self, text: str | bytes) -> bool:
        try:
            data = text.encode() if isinstance(text, str) else text
            data.decode()
        except UnicodeError:
            return False  # a lone surrogate, or bytes that are not UTF-8
        if self._whole is None:
            self._whole = self._make_whole()
        parser = _parser(self._whole)
        budget = Budget("grammar", self.limits)
        budget.start(self.limits.compile_s)
        for begin in range(0, len(data), _CHUNK):
            if not parser.accept_string(data[begin : begin + _CHUNK]):
                return False
            budget.check()
        return bool(parser.is_completed())


def _parser(compiled: Any) -> Any:
    import xgrammar

    return xgrammar.GrammarMatcher(compiled)


class XGrammarMatcher:
    """A ``Matcher``: a parser, the accepted tokens, and the forced run that is under way at each position."""

    def __init__(self, grammar: XGrammarGrammar) -> None:
        self._grammar = grammar
        self._trie = grammar.trie
        self._parser = grammar.parser()
        self._output: list[int] = []  # without EOS
        self._runs: list[tuple[int, ...] | None] = [None]
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
        if not 0 <= token_id < len(self._trie.data) or not self._trie.data[token_id]:
            return False
        run = self._run()
        if run and run[0] != token_id:
            return False
        if not self._parser.accept_token(token_id):
            return False
        self._output.append(token_id)
        self._runs.append(run[1:] or None)
        self._mask = None
        return True

    def forced(self) -> list[int]:
        return [] if self._ended else list(self._run())

    def rollback(self, n: int) -> None:
        accepted = len(self._output) + self._ended
        if not 0 <= n <= accepted:
            raise ValueError(f"cannot take back {n} tokens: {accepted} were accepted")
        back = n - self._ended if n else 0
        self._ended = self._ended and not n
        if back:
            self._parser.rollback(back)
            del self._output[-back:], self._runs[-back:]
            self._mask = None

    def is_accepting(self) -> bool:
        return not self._ended and bool(self._parser.is_completed())

    def is_finished(self) -> bool:
        if self._ended:
            return True
        return self.is_accepting() and np.array_equal(self._allowed(), self._only_eos())

    def _allowed(self) -> MaskRow:
        """int32 [mask_words], kept until the matcher moves."""
        if self._mask is None:
            vocabulary = self._grammar.vocabulary
            mask = np.full((1, vocabulary.mask_words), -1, np.int32)
            began = time.thread_time()
            self._parser.fill_next_token_bitmask(mask)
            if time.thread_time() - began > self._grammar.limits.mask_s:
                reason = f"a mask needs more than {self._grammar.limits.mask_s:g} s of CPU time; simplify it"
                raise ConstraintError("grammar", "timeout", f"output token {len(self._output)}", reason)
            if vocabulary.size % 32:
                mask.view(np.uint32)[0, -1] &= (1 << vocabulary.size % 32) - 1
            self._mask = mask[0]
        return self._mask

    def _only_eos(self) -> MaskRow:
        row = np.zeros(self._grammar.vocabulary.mask_words, np.uint32)
        for token in self._grammar.vocabulary.eos_token_ids:
            row[token >> 5] |= 1 << (token & 31)
        return row.view(np.int32)

    def _run(self) -> tuple[int, ...]:
        run = self._runs[-1]
        if run is None:
            run = self._runs[-1] = self._forced_run()
        return run

    def _forced_run(self) -> tuple[int, ...]:
        data = self._parser.find_jump_forward_string().encode()[: self._grammar.limits.forced_bytes + 1]
        if len(data) > self._grammar.limits.forced_bytes:
            data = data[: whole_characters(data)]
        if not data:
            return ()
        end = self._parser.fork()
        if not end.accept_string(data):
            return ()
        return forced_run(
            self._trie, self._output, data, lambda node: _spans(end, self._trie, node), _following(end)
        )


def _spans(parser: Any, trie: TokenTrie, node: int) -> bool:
    """May a token below this node follow, of which the parser has read the bytes up to the node?"""
    nodes = trie.nodes
    first = int(nodes.first_child[node])
    for child in range(first, first + int(nodes.child_count[node])):
        if parser.accept_string(bytes([int(nodes.byte[child])])):
            found = bool(trie.token[child] >= 0) or _spans(parser, trie, child)
            parser.rollback(1)
            if found:
                return True
    return False


def _following(parser: Any) -> list[str]:
    """Characters that may come next: one of each kind in ASCII, one of each longer length in UTF-8."""
    kinds: dict[str, str] = {}
    for byte in [*range(0x80), *range(0xC2, 0xF5)]:
        kind = kind_of(chr(byte)) if byte < 0x80 else "2 bytes" if byte < 0xE0 else f"{byte >> 4:x}"
        if kind not in kinds and parser.accept_string(bytes([byte])):
            data = bytes([byte]) + _rest(parser, {0: 0, 0xE: 2, 0xF: 3}.get(byte >> 4, int(byte >= 0x80)))
            parser.rollback(1)
            kinds[kind] = data.decode()
    return list(kinds.values())


def _rest(parser: Any, count: int) -> bytes:
    """Some continuation bytes that complete the character; the parser does not move."""
    if not count:
        return b""
    for byte in range(0x80, 0xC0):
        if parser.accept_string(bytes([byte])):
            rest = bytes([byte]) + _rest(parser, count - 1)
            parser.rollback(1)
            return rest
    raise AssertionError("a character that was begun can always be completed")
