"""The exact bytes that each token id stands for, for the two ways in which vocabularies spell bytes."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

from trellis.errors import ModelLoadError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_MARK = "▁"  # U+2581 stands for a space in SentencePiece vocabularies


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table).

    Printable bytes stand for themselves; the 68 others take the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


def decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    """Names of the steps of the tokenizer's decoder, e.g. ``{"ByteLevel"}``."""
    if backend.decoder is None:
        return set()

    def walk(node: dict[str, Any]) -> set[str]:
        kinds = {str(node.get("type"))}
        for child in node.get("decoders", ()):
            kinds |= walk(child)
        return kinds

    return walk(json.loads(backend.decoder.__getstate__()))


def token_bytes(backend: tokenizers.Tokenizer, size: int) -> list[bytes]:
    """Bytes of the ids 0 .. size-1; ``b""`` where the vocabulary has no such id.

    Added tokens (special ones too) are literal text. ModelLoadError when the vocabulary spells its tokens in
    another way than byte-level or SentencePiece with byte fallback: constraints need the exact bytes.
    """
    kinds = decoder_kinds(backend)
    if "ByteLevel" in kinds:
        spell = _byte_level()
    elif kinds & {"ByteFallback", "Replace", "Metaspace"}:
        spell = _sentencepiece
    else:
        raise ModelLoadError(
            f"tokenizer with decoder {sorted(kinds) or 'none'} is not supported: "
            "token bytes are known for byte-level and SentencePiece vocabularies"
        )
    result = [b""] * size
    for token, token_id in backend.get_vocab(with_added_tokens=False).items():
        if token_id < size:
            result[token_id] = spell(token)
    for token_id, added in backend.get_added_tokens_decoder().items():
        if token_id < size:
            result[token_id] = added.content.encode()
    return result


def _byte_level() -> Any:
    table = byte_alphabet()

    def spell(token: str) -> bytes:
        try:
            return bytes(table[char] for char in token)
        except KeyError:  # not written in the alphabet: literal text
            return token.encode()

    return spell


def _sentencepiece(token: str) -> bytes:
    match = BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(SPACE_MARK, " ").encode()
