"""Which tokens may stand across the place where a text begins, asked of a parser that moves by tokens.

The rest of most tokens (``the`` of ``" the"``) is a token itself, and the parser's mask of its first position
says whether that may come: all of these are looked up at once. The others are tried one by one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from trellis.fsm.contract import MaskRow
from trellis.fsm.flat_trie import LongArray
from trellis.fsm.trie import TokenTrie

_TRIED = (
    1000  # rests that are no token, at most; in the order of the ids, which is about that of their frequency
)
_KEPT = 64


def spanning_tokens(
    trie: TokenTrie, data: bytes, mask: MaskRow, begins: Callable[[bytes], bool]
) -> LongArray:
    """Ids of tokens that begin with ``data`` and go on with what a text may begin with.

    mask: of a text's first position. begins: may a text begin with these bytes? Where very many rests have to be
    tried some tokens may be missing, none is wrong. One vectorised pass a byte over the tokens that begin so.
    """
    node = trie.nodes.find(data)
    if node <= 0:
        return np.zeros(0, np.int64)
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(np.bool_)
    found, open_nodes = _look_up(trie, node, allowed)
    tried = np.sort(trie.tokens_at(open_nodes))[:_TRIED].tolist()
    tried = [token for token in tried if begins(trie.data[token][len(data) :])]
    return np.concatenate([trie.tokens_at(found), np.array(tried, np.int64)])


def _look_up(trie: TokenTrie, node: int, allowed: npt.NDArray[np.bool_]) -> tuple[LongArray, LongArray]:
    """Nodes of tokens below ``node`` whose rest is an allowed token, and of those that have to be tried."""
    nodes = trie.nodes
    keys = nodes.parent * 256 + nodes.byte  # ascending, as nodes are numbered by parent and byte
    here, rest = np.array([node]), np.zeros(1, np.int64)  # the rest's own node; -1 where the vocabulary ends
    found, tried = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    while len(here):
        counts = nodes.child_count[here]
        ends = np.cumsum(counts)
        here = np.repeat(nodes.first_child[here] - (ends - counts), counts) + np.arange(ends[-1])
        above = np.repeat(rest, counts)
        wanted = above * 256 + nodes.byte[here]
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        rest = np.where((above >= 0) & (keys[at] == wanted), at, -1)
        token = np.where(rest >= 0, trie.token[rest], -1)
        # A text that begins with the rest begins with each token that the rest begins with, too.
        live = (token < 0) | allowed[token]
        here, rest, token = here[live], rest[live], token[live]
        holds = trie.token[here] >= 0
        found.append(here[holds & (token >= 0)])
        tried.append(here[holds & (token < 0)])
    return np.concatenate(found), np.concatenate(tried)


class KeptSpans:
    """What a grammar's ``spanning`` answered, by the bytes asked about; the newest ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, LongArray] = OrderedDict()

    def get(self, data: bytes, make: Callable[[], LongArray]) -> LongArray:
        found = self._kept.get(data)
        if found is None:
            found = make()
            self._kept[data] = found
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found
