"""Where the end of a prompt's text may be taken back, to be written again by the model (see ``fsm/healing.py``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trellis.fsm.contract import Vocabulary
from trellis.fsm.longer_tokens import longer_tokens

MAX_TAKEN_BACK = 4  # tokens; an ending of more that are the start of a single longer one is hardly ever seen


def exits(
    text: str,
    ids: Sequence[int],
    vocabulary: Vocabulary,
    encode: Callable[[str], list[int]],
    keep: bool,
) -> list[int]:
    """How many of the last tokens may be taken back, ascending: each number is a place where a longer token could
    stand instead.

    text: the last segment of a prompt, ids: its tokens, as ``encode`` gives them. keep: some of the text has to
    stay (it is the first segment). Only ordinary text tokens are taken back, and only if what stays is text that
    is spelled as it is now, so that a prompt with the shorter text and the new tokens finds all of them cached.
    """
    longer = longer_tokens(vocabulary)
    data, taken, found = text.encode(), b"", []
    for count in range(1, min(MAX_TAKEN_BACK, len(ids)) + 1):
        token = ids[-count]
        spelled = vocabulary.token_bytes[token] if token < len(vocabulary.token_bytes) else b""
        if not spelled:
            break  # a special token
        taken = spelled + taken
        if len(taken) + keep > len(data) or not data.endswith(taken):
            break  # the tokenizer has put something before the text
        begins_inside = taken[0] & 0xC0 == 0x80
        if not begins_inside and longer.exist(taken):
            rest = data[: len(data) - len(taken)].decode()
            if encode(rest) == list(ids[: len(ids) - count]):
                found.append(count)
    return found
