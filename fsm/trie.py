"""The vocabulary as a trie of the tokens' bytes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from trellis.fsm.contract import MaskRow, Vocabulary
from trellis.fsm.flat_trie import FlatTrie, LongArray


class TokenTrie:
    """Every token that a constrained text may hold, at a node of the trie. Immutable, shared by all grammars.

    data: bytes of each token id, b"" for special, EOS and unused ids. singles: bytes that are a token.
    token: int32 [nodes], a token with the node's bytes or -1; ``twins`` has further ones.
    parent_in_level: int64 [nodes], the parent's place in its level.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        eos = vocabulary.eos_token_ids
        self.data = [
            b"" if token in eos else bytes(data)
            for token, data in enumerate(vocabulary.token_bytes[: vocabulary.size])
        ]
        usable = sorted((data, token) for token, data in enumerate(self.data) if data)
        self.singles = frozenset(data[0] for data, _ in usable if len(data) == 1)
        self.nodes = FlatTrie([data for data, _ in usable])
        ids = np.array([token for _, token in usable], np.int32)
        self.token: npt.NDArray[np.int32] = np.full(len(self.nodes), -1, np.int32)
        self.token[self.nodes.ends] = ids
        twin = self.token[self.nodes.ends] != ids
        self.twins = (self.nodes.ends[twin], ids[twin])
        above = [0, *self.nodes.levels[: self.nodes.depth]]  # where the level above each level begins
        starts = np.repeat(above, np.diff(self.nodes.levels))
        self.parent_in_level: LongArray = self.nodes.parent - starts
        self._eos = np.array(sorted(eos), np.int64)

    def tokens_at(self, nodes: LongArray) -> LongArray:
        """Ids (int64) of all tokens at these nodes, each of which holds one."""
        twin_nodes, twin_ids = self.twins
        first = self.token[nodes].astype(np.int64)
        return np.concatenate([first, twin_ids[np.isin(twin_nodes, nodes)]]) if len(twin_nodes) else first

    def pack(self, nodes: LongArray, eos: bool) -> MaskRow:
        """Bit mask (int32 [mask_words]) of the tokens at these nodes, and of EOS."""
        allowed = np.zeros(self.vocabulary.mask_words * 32, np.uint8)
        allowed[self.tokens_at(nodes)] = 1
        if eos:
            allowed[self._eos] = 1
        return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)

    def spell(self, data: bytes) -> list[int] | None:
        """Some tokens that together stand for these bytes, the longest one first each time; None if that fails.

        For what reads bytes whatever the tokens; the model's own spelling is ``vocabulary.encode``.
        """
        out: list[int] = []
        begin = 0
        while begin < len(data):
            node = length = 0
            found = -1
            while begin + length < len(data):
                node = self.nodes.find(data[begin + length : begin + length + 1], node)
                if node < 0:
                    break
                length += 1
                if self.token[node] >= 0:
                    found, end = int(self.token[node]), begin + length
            if found < 0:
                return None
            out.append(found)
            begin = end
        return out


@lru_cache(maxsize=8)
def trie_of(vocabulary: Vocabulary) -> TokenTrie:
    """The trie of a vocabulary; built once for each vocabulary object (about 0.1 s for 50,000 tokens)."""
    return TokenTrie(vocabulary)
