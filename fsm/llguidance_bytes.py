"""A grammar byte by byte, next to the parser over the model's tokens: what may come after forced bytes?

Whether forced bytes are forced tokens depends on what may follow them (see ``forced``). The parser over the
model's tokens cannot say, as it moves by tokens; one whose tokens are the 256 bytes can.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trellis.errors import ConstraintError
from trellis.fsm.forced import kind_of
from trellis.fsm.trie import TokenTrie

BYTES = 256
_WORDS = (BYTES + 1 + 31) // 32  # of a mask over the bytes and EOS


class BytePath:
    """A parser over bytes that is led along an output; it goes on from where it was last.

    parser: an ``LLMatcher`` at the start, which this owns. All methods may raise ConstraintError; the path is
    of no further use then.
    """

    def __init__(self, kind: str, parser: Any, trie: TokenTrie) -> None:
        self._kind = kind
        self._parser = parser
        self._trie = trie
        self._data = b""

    def lead(self, data: bytes) -> bool:
        """Go to the position after these bytes; False if they are not allowed."""
        if not data.startswith(self._data):
            same = (i for i, (a, b) in enumerate(zip(data, self._data, strict=False)) if a != b)
            self._back(len(self._data) - next(same, min(len(data), len(self._data))))
        return self._read(data[len(self._data) :])

    def accepting(self) -> bool:
        accepting = bool(self._parser.is_accepting())
        self._check()
        return accepting

    def live(self) -> list[int]:
        """The bytes that may come next, in order."""
        mask = np.zeros(_WORDS, np.int32)
        self._parser.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:BYTES]
        live: list[int] = np.flatnonzero(bits).tolist()
        return live

    def spans(self, node: int) -> bool:
        """May a token below this node of the vocabulary's trie go on from here?"""
        nodes = self._trie.nodes
        first, count = int(nodes.first_child[node]), int(nodes.child_count[node])
        live = set(self.live()) if count else set()
        reached = [child for child in range(first, first + count) if int(nodes.byte[child]) in live]
        if any(self._trie.token[child] >= 0 for child in reached):
            return True
        for child in reached:
            if self._read(bytes([int(nodes.byte[child])])):
                found = self.spans(child)
                self._back(1)
                if found:
                    return True
        return False

    def following(self) -> list[str]:
        """Characters that may come next: one of each kind in ASCII, one of each longer length in UTF-8."""
        kinds: dict[str, str] = {}
        for byte in self.live():
            kind = kind_of(chr(byte)) if byte < 0x80 else f"{_length(byte)} bytes"
            if kind not in kinds:
                kinds[kind] = self._character(byte)
        return list(kinds.values())

    def _character(self, lead: int) -> str:
        """A character that may come next and begins with this byte."""
        data = bytes([lead])
        while len(data) < _length(lead) and self._read(data[-1:]):
            data += bytes(self.live()[:1])
        self._back(len(data) - 1)
        return data.decode()

    def _read(self, data: bytes) -> bool:
        ids = list(data)
        if self._parser.validate_tokens(ids) < len(ids):
            self._check()
            return False
        self._parser.consume_tokens(ids)
        self._check()
        self._data += data
        return True

    def _back(self, n: int) -> None:
        if n:
            self._parser.rollback(n)
            self._data = self._data[:-n]

    def _check(self) -> None:
        if self._parser.is_error():
            raise fault(self._kind, self._parser)


def _length(lead: int) -> int:
    """Bytes of a character that begins with this one."""
    return 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


def fault(kind: str, parser: Any) -> ConstraintError:
    """Why a parser failed while it was used."""
    message = str(parser.get_error()).partition("\n")[0].strip()
    if "NoExtension" in message:
        return ConstraintError(kind, "empty", "", "no text satisfies the constraint")
    return ConstraintError(kind, "limit", "", f"too complex to go on: {message[:200]}")
