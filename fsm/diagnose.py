"""How a grammar takes a given text: what would be forced, and where and why it is refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trellis.fsm.contract import Grammar, Matcher, Vocabulary
from trellis.fsm.labels import octets, quoted

_SHOWN = 60  # characters of text that must come
_LOOKED_AT = 64  # positions from which the search for the furthest failure goes on


@dataclass(frozen=True)
class Failure:
    """at: bytes of the text that can be taken. expected: the bytes that may come there. following: the bytes
    that must come there, as far as they are known. may_end: the text might end there."""

    at: int
    expected: frozenset[int]
    following: bytes
    may_end: bool


@dataclass(frozen=True)
class Trace:
    """tokens: of the text in the model's own spelling. forced: how many of them the grammar leaves no choice
    about. failure: None if the text was taken to its end and may end there."""

    tokens: int
    forced: int
    failure: Failure | None


def trace(grammar: Grammar, vocabulary: Vocabulary, text: str) -> Trace:
    """Walk a matcher over the canonical tokens of a text. Raises ConstraintError."""
    ids = vocabulary.encode(text)
    data = text.encode()
    matcher = grammar.matcher()
    taken = forced = at = 0
    while taken < len(ids):
        run = matcher.forced()
        same = _common(run, ids[taken:])
        if run and same == 0:
            break
        step = ids[taken : taken + max(same, 1)]
        # What the tokenizer wrote must be the text: a vocabulary that lacks a byte may write something else.
        written = b"".join(_bytes(vocabulary, token) for token in step)
        if data[at : at + len(written)] != written or not all(map(matcher.accept, step)):
            break
        forced += same
        taken += len(step)
        at += len(written)
    if taken == len(ids) and matcher.is_accepting():
        return Trace(len(ids), forced, None)
    return Trace(len(ids), forced, _furthest(matcher, vocabulary, data, at))


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _bytes(vocabulary: Vocabulary, token: int) -> bytes:
    return bytes(vocabulary.token_bytes[token]) if token < len(vocabulary.token_bytes) else b""


class _Search:
    """What the furthest positions had in common: the best place so far, and what may come there."""

    def __init__(self) -> None:
        self.at = -1
        self.ways: set[bytes] = set()
        self.may_end = False

    def found(self, at: int, ways: set[bytes], may_end: bool) -> None:
        if at > self.at:
            self.at, self.ways, self.may_end = at, set(), False
        if at == self.at:
            self.ways |= ways
            self.may_end |= may_end


def _furthest(matcher: Matcher, vocabulary: Vocabulary, data: bytes, begin: int) -> Failure:
    """Where the text fails on every way of spelling it. Moves the matcher about; it ends where it was."""
    search = _Search()
    _look(matcher, vocabulary, data, begin, search, set())
    following = _shared_start(search.ways)
    expected = frozenset(way[0] for way in search.ways)
    return Failure(search.at, expected, following, search.may_end)


def _look(
    matcher: Matcher, vocabulary: Vocabulary, data: bytes, at: int, search: _Search, seen: set[int]
) -> None:
    seen.add(at)
    tokens = _allowed(matcher, vocabulary)
    # At a forced position the whole run is known, not only its first token.
    run = b"".join(_bytes(vocabulary, token) for token in matcher.forced())
    live, depth = {run} if run else set(tokens), 0
    search.found(at, live, matcher.is_accepting())
    while longer := {word for word in live if word[: depth + 1] == data[at : at + depth + 1] != word[:depth]}:
        live, depth = longer, depth + 1
        search.found(at + depth, {word[depth:] for word in live if len(word) > depth}, False)
    for length in range(depth, 0, -1):
        token = tokens.get(data[at : at + length])
        if token is not None and at + length not in seen and len(seen) < _LOOKED_AT and matcher.accept(token):
            _look(matcher, vocabulary, data, at + length, search, seen)
            matcher.rollback(1)


def _allowed(matcher: Matcher, vocabulary: Vocabulary) -> dict[bytes, int]:
    """The tokens that may come next, by their bytes."""
    row = np.empty(vocabulary.mask_words, np.int32)
    if not matcher.fill_mask(row):
        row.fill(-1)
    ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: vocabulary.size])
    found = {
        _bytes(vocabulary, token): token for token in ids.tolist() if token not in vocabulary.eos_token_ids
    }
    found.pop(b"", None)
    return found


def _shared_start(ways: set[bytes]) -> bytes:
    if not ways:
        return b""
    low, high = min(ways), max(ways)
    length = next((i for i, (x, y) in enumerate(zip(low, high, strict=False)) if x != y), len(low))
    return low[:length]


def describe(failure: Failure) -> str:
    """What was expected, in words: ``"name": ``, ``[0-9]``, or the end of the text."""
    parts: list[str] = []
    if len(failure.following) > 1:
        text = failure.following.decode("utf-8", "backslashreplace")
        parts.append(quoted(text[:_SHOWN]) + ("…" if len(text) > _SHOWN else ""))
    elif failure.expected:
        parts += _sets(failure.expected)
    if failure.may_end:
        parts.append("the end of the text")
    return " or ".join(parts) or "nothing that this model's vocabulary can write"


def _sets(expected: frozenset[int]) -> list[str]:
    """Plain characters together; the first bytes of others by how many bytes they announce."""
    plain = [byte for byte in expected if byte < 0x80]
    inside = [byte for byte in expected if 0x80 <= byte < 0xC0]
    leads = [byte for byte in expected if byte >= 0xC0]
    parts = [octets(plain, 60)] if plain else []
    if inside:
        parts.append(f"the rest of a character ({octets(inside)})")
    if leads:
        parts.append(
            "some characters that are not ASCII"
            if len(leads) > 4
            else f"a character that begins with {octets(leads)}"
        )
    return parts
