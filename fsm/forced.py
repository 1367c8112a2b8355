"""Forced runs: from bytes that have no alternative to tokens that have none.

Forced bytes are not yet forced tokens. The model's own spelling of them depends on what stands before (the
tokenizer may merge across) and after (a longer token may begin inside them and reach past their end). So the
output's tail and the forced bytes are spelled together; the run is dropped where history would have to
change, and cut before the first byte at which a token that the grammar allows could reach past the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trellis.fsm.trie import TokenTrie

_TAIL = 4  # output tokens that are spelled again, so that merges across the boundary show
_REACH = 4  # tokens at the end of the spelling that a longer one may replace


def forced_run(
    trie: TokenTrie,
    output: Sequence[int],
    forced: bytes,
    spans: Callable[[int], bool],
    following: Sequence[str],
) -> tuple[int, ...]:
    """The tokens that must follow ``output``, given the bytes that must follow.

    forced: whole characters from the output's end (the first may complete one that the output began).
    spans(node): may a token below this node of the trie follow, if its bytes up to the node are the end of
        the forced bytes?
    following: characters that may follow the forced bytes, one of each kind (see ``kind_of``).
    """
    spelling = _spell(trie, tail_of(trie, output), forced)
    if spelling is None:
        return ()
    tail, text, spelled = spelling
    data = text.encode()
    pieces = [trie.data[token] if 0 <= token < len(trie.data) else b"" for token in spelled]
    if b"".join(pieces) != data or not all(pieces):
        return ()  # the text has no spelling in plain tokens (it holds the name of a special one)
    cut = _first_span(trie, data, sum(map(len, pieces[:-_REACH])), spans)
    kept = end = 0
    while kept < len(pieces) and end + len(pieces[kept]) <= cut:
        end += len(pieces[kept])
        kept += 1
    for char in following if kept > len(tail) else ():
        kept = _common(spelled[:kept], trie.vocabulary.encode(text + char))
    return tuple(spelled[len(tail) : kept])


def held_back(trie: TokenTrie, output: Sequence[int], forced: bytes) -> tuple[int, ...]:
    """The forced bytes as tokens, as if nothing could be spelled together with their end.

    Where ``forced_run`` gives nothing this is no more than a good guess at what the model will choose.
    """
    spelling = _spell(trie, tail_of(trie, output), forced)
    if spelling is None:
        return ()
    tail, _, spelled = spelling
    return tuple(spelled[len(tail) : len(tail) + _REACH])


def _spell(trie: TokenTrie, tail: list[int], forced: bytes) -> tuple[list[int], str, list[int]] | None:
    """As much of the output's tail as keeps its tokens when it is spelled together with the forced bytes; the
    text of both; its tokens.

    All of the tail, as long as the model spells as its tokenizer does. Where it began a word otherwise ("m" of
    "min|istry"), no spelling of the rest makes the history canonical, and that is no reason to leave bytes
    that are known to the model: they are spelled after the tokens that stand.
    """
    for begin in range(len(tail) + 1):
        kept = tail[begin:]
        data = b"".join(trie.data[token] for token in kept) + forced
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue  # it begins inside a character
        spelled = trie.vocabulary.encode(text)
        if spelled[: len(kept)] == kept:
            return kept, text, spelled
    return None


def tail_of(trie: TokenTrie, output: Sequence[int]) -> list[int]:
    """The last few output tokens; more if those begin inside a character."""
    begin = max(len(output) - _TAIL, 0)
    while begin > 0 and trie.data[output[begin]][:1] and trie.data[output[begin]][0] & 0xC0 == 0x80:
        begin -= 1
    return list(output[begin:])


def _first_span(trie: TokenTrie, data: bytes, begin: int, spans: Callable[[int], bool]) -> int:
    """First byte from ``begin`` on at which an allowed token starts that reaches past the end."""
    for start in range(begin, len(data)):
        node = trie.nodes.find(data[start:])
        if node > 0 and spans(node):
            return start
    return len(data)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def kind_of(char: str) -> str:
    """Tokenizers split text by kinds of characters; two ASCII characters of a kind are split alike."""
    if char.isalpha():
        return "lower" if char.islower() else "upper"
    if char.isdigit():
        return "digit"
    return char if char.isspace() or char == "'" else "other"


def whole_characters(data: bytes) -> int:
    """Length of ``data`` without the incomplete character it ends with."""
    end = len(data)
    while end > 0 and data[end - 1] & 0xC0 == 0x80:
        end -= 1
    return max(end - 1, 0)
