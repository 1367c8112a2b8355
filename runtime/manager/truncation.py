"""Prompts that are too long, cut where that was allowed.

What is kept is the end. A prompt's end says what is wanted: the last question, and in a chat the template's opening of the
answer, without which the model would go on with the user's text. What goes is what stands at the beginning; only the
BOS token stays there, since models were trained with it in front.
"""

from __future__ import annotations

from collections.abc import Sequence

ANSWER_SHARE = (
    4  # of the context, a quarter: what a prompt leaves room for where more new tokens are only a bound
)
STEPS = 16  # so many of them make a prompt; it is cut in whole ones
LONGEST = 16  # contexts: what is longer than so many is refused before it is tokenized


def prompt_limit(context: int, new_tokens: int, strict: bool) -> int:
    """The longest prompt that leaves room for an answer, at least a token of it. strict: for all of ``new_tokens``."""
    return context - max(1, new_tokens if strict else min(new_tokens, context // ANSWER_SHARE))


def shortened(ids: Sequence[int], limit: int, bos: Sequence[int]) -> list[int]:
    """At most ``limit`` of the ids: those of ``bos``, if they begin with them, and their end. All of them if that is
    too little to keep anything.

    Cut in steps of a sixteenth of the limit, so that a conversation that grows is cut at the same place for some turns, and
    finds what it has in common with the last in the cache.
    """
    kept = len(bos) if list(ids[: len(bos)]) == list(bos) else 0
    surplus = len(ids) - limit
    if surplus <= 0 or limit <= kept:
        return list(ids)
    step = max(1, (limit - kept) // STEPS)
    return [*ids[:kept], *ids[kept + surplus + -surplus % step :]]


def truncation_warning(tokens: int) -> str:
    """What a client is told about a prompt that lost so many tokens."""
    return f"the prompt was too long: {tokens} tokens at its beginning were cut"
