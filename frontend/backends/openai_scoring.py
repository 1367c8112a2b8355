"""``select`` on a completions API: log-probabilities of a prompt's own tokens (``echo`` with ``logprobs``)."""

from __future__ import annotations

from collections.abc import Sequence

from trellis.errors import BackendError
from trellis.frontend.backends.base import Counts, OptionScore, ScoreResult
from trellis.frontend.backends.openai_answers import Piece, token_id

AT_ONCE = 64
"""Prompts of one call; servers bound how many they take."""


def scored(alone: Piece, pieces: Sequence[Piece], counts: Counts, token_ids: bool, api: str) -> ScoreResult:
    """Every option's own tokens, from the place where all tokenisations still agree.

    alone: the prompt; pieces: the prompt with each option, tokenised as one text. BackendError where an API gives
    no log-probabilities, or where the options are merged with the very first token, which has none.
    """
    rows = [[token.spelled for token in piece.tokens] for piece in (alone, *pieces)]
    if not all(rows):
        raise BackendError(f"{api} gave no log-probabilities of the prompt; select needs echo with logprobs")
    start = 0
    while all(len(row) > start and row[start] == rows[0][start] for row in rows):
        start += 1
    if start == 0:
        reason = "the options are merged with the first token of the prompt, which has no log-probability"
        raise BackendError(f"{api}: {reason}; begin with more text")
    numbers = _Numbers(token_ids)
    options = [
        OptionScore(
            tuple(numbers.of(token.spelled) for token in piece.tokens[start:]),
            tuple(token.logprob for token in piece.tokens[start:]),
        )
        for piece in pieces
    ]
    return ScoreResult(tuple(options), counts)


class _Numbers:
    """Token ids. Where an API does not tell them, tokens are numbered as they come: the same token, the same number."""

    def __init__(self, told: bool) -> None:
        self._told = told
        self._seen: dict[str, int] = {}

    def of(self, spelled: str) -> int:
        return token_id(spelled) if self._told else self._seen.setdefault(spelled, len(self._seen))
