"""A vocabulary as llguidance wants it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from trellis.fsm.charset import Ranges
from trellis.fsm.contract import Vocabulary
from trellis.fsm.llguidance_bytes import BYTES
from trellis.fsm.spelling import spelling_of
from trellis.fsm.trie import TokenTrie, trie_of


@dataclass(frozen=True, eq=False)
class LLTokens:
    """tokenizer: llguidance's ``LLTokenizer`` of the vocabulary. bytewise: one whose tokens are the 256 bytes,
    for whole texts. text: bytes of each id, b"" for those that no constrained text may hold.
    trie: of those. alphabet: characters that can be written."""

    tokenizer: Any
    bytewise: Any
    text: Sequence[bytes]
    trie: TokenTrie
    alphabet: Ranges


class _Wrapper:
    """What ``LLTokenizer`` asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos: list[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = eos[0]
        self.special_token_ids = eos

    def __call__(self, text: str | bytes) -> list[int]:
        """The spelling of a text. llguidance wants it for forced tokens, which are worked out elsewhere."""
        raise NotImplementedError("forced tokens are not llguidance's task here")


@lru_cache(maxsize=8)
def ll_tokens(vocabulary: Vocabulary) -> LLTokens:
    """Made once for each vocabulary object (0.2 s for 50,000 tokens)."""
    from llguidance import LLTokenizer

    usable = _usable(vocabulary)
    trie = trie_of(usable)
    eos = sorted(vocabulary.eos_token_ids)
    tokens = [*trie.data, *[b""] * (vocabulary.size - len(trie.data))]
    slices = LLTokenizer.general_slices()
    tokenizer = LLTokenizer(_Wrapper(tokens, eos), n_vocab=vocabulary.size, eos_token=eos, slices=slices)
    one_by_one = _Wrapper([*(bytes([b]) for b in range(BYTES)), b""], [BYTES])
    bytewise = LLTokenizer(one_by_one, n_vocab=BYTES + 1, eos_token=BYTES, slices=[])
    return LLTokens(tokenizer, bytewise, tokens, trie, spelling_of(usable).alphabet)


def _usable(vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary without tokens that could lead into a dead end.

    A token may end inside a character, so the rest of every such character must be writable. It is when all
    continuation bytes are tokens; where some are not, only tokens of whole characters are used.
    """
    if trie_of(vocabulary).singles.issuperset(range(0x80, 0xC0)):
        return vocabulary
    whole = [data if _is_text(data) else b"" for data in vocabulary.token_bytes]
    return replace(vocabulary, token_bytes=whole)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
