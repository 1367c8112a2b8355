"""The ``Grammar`` and ``Matcher`` over xgrammar's parser.

The parser walks bytes (an Earley parser with masks of the vocabulary worked out at compile time).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trellis.errors import ConstraintError
from trellis.fsm.contract import MaskRow, Vocabulary
from trellis.fsm.flat_trie import LongArray
from trellis.fsm.forced import forced_run, held_back, kind_of, whole_characters
from trellis.fsm.limits import Budget, Limits
from trellis.fsm.parser_matcher import ParserMatcher
from trellis.fsm.spanning import KeptSpans, spanning_tokens
from trellis.fsm.trie import TokenTrie

_CHUNK = 32  # bytes that are parsed between two looks at the clock


class XGrammarGrammar:
    """A ``Grammar`` that ``BeginsInside``.

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
        self._spans = KeptSpans()
        self._nbytes = int(compiled.memory_size_bytes)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def vocabulary(self) -> Vocabulary:
        return self.trie.vocabulary

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self)

    def spanning(self, data: bytes) -> LongArray:
        parser = self.parser()

        def begins(rest: bytes) -> bool:
            return bool(parser.accept_string(rest)) and parser.rollback(1) is None

        mask = XGrammarMatcher(self).allowed
        return self._spans.get(data, lambda: spanning_tokens(self.trie, data, mask(), begins))

    def joint_run(self, output: Sequence[int], data: bytes) -> tuple[int, ...]:
        return forced_after(self.parser(), self, output, data)

    def begun(self, output: Sequence[int], data: bytes, run: Sequence[int] = ()) -> XGrammarMatcher | None:
        parser = self.parser()
        if data and not parser.accept_string(data):
            return None
        return XGrammarMatcher(self, output, parser, run)

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


class XGrammarMatcher(ParserMatcher):
    """A ``Matcher``. before, run: see ``BeginsInside.begun``. parser: where it begins; at the start by default."""

    def __init__(
        self,
        grammar: XGrammarGrammar,
        before: Sequence[int] = (),
        parser: Any = None,
        run: Sequence[int] = (),
    ) -> None:
        super().__init__(grammar.vocabulary, grammar.trie.data, before, run)
        self._grammar = grammar
        self._parser = grammar.parser() if parser is None else parser

    def _consume(self, token_id: int) -> bool:
        return bool(self._parser.accept_token(token_id))

    def _take_back(self, n: int) -> None:
        self._parser.rollback(n)

    def _complete(self) -> bool:
        return bool(self._parser.is_completed())

    def _compute_mask(self) -> MaskRow:
        size = self._vocabulary.size
        mask = np.full((1, self._vocabulary.mask_words), -1, np.int32)
        began = time.thread_time()
        self._parser.fill_next_token_bitmask(mask)
        if time.thread_time() - began > self._grammar.limits.mask_s:
            reason = f"a mask needs more than {self._grammar.limits.mask_s:g} s of CPU time; simplify it"
            raise ConstraintError("grammar", "timeout", f"output token {len(self._output)}", reason)
        if size % 32:
            mask.view(np.uint32)[0, -1] &= (1 << size % 32) - 1
        row: MaskRow = mask[0]
        return row

    def draft(self) -> list[int]:
        if self._ended or self._run():
            return []
        forced = _forced_bytes(self._parser, self._grammar)
        trie = self._grammar.trie
        return list(held_back(trie, [*self._before, *self._output], forced)) if forced else []

    def _forced_run(self) -> tuple[int, ...]:
        return forced_after(self._parser, self._grammar, [*self._before, *self._output])


def forced_after(
    parser: Any, grammar: XGrammarGrammar, output: Sequence[int], ahead: bytes = b""
) -> tuple[int, ...]:
    """The tokens that have no alternative after ``output``, if ``ahead`` comes before what the parser reads next."""
    data = _forced_bytes(parser, grammar)
    if not ahead + data:
        return ()
    end = parser.fork()
    if data and not end.accept_string(data):
        return ()
    trie = grammar.trie
    return forced_run(trie, output, ahead + data, lambda node: _spans(end, trie, node), _following(end))


def _forced_bytes(parser: Any, grammar: XGrammarGrammar) -> bytes:
    """The next bytes that have no alternative, whole characters."""
    data: bytes = parser.find_jump_forward_string().encode()[: grammar.limits.forced_bytes + 1]
    return data if len(data) <= grammar.limits.forced_bytes else data[: whole_characters(data)]


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
