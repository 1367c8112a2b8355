"""The last tokens of a prompt that are taken back and written again (see ``trellis.fsm.healing``).

A token that comes again is the prompt's, as if it had never been taken back: nothing of it is output, counted
against a limit or reported. The output begins with the first token that comes instead of one taken back; of
that one's bytes the first are the prompt's text, and the rest is the first of the new text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trellis.fsm.contract import Vocabulary
from trellis.fsm.healing import HealingMatcher

if TYPE_CHECKING:
    from trellis.runtime.scheduler.request import Request

_BEFORE = 16  # prompt tokens that stay and whose spelling may matter to what follows


@dataclass(slots=True)
class Healing:
    """taken: tokens taken back that have not come again, in order. exits: see ``HealingMatcher``.

    overlap: once another token came, the bytes of the prompt that the output spells again; pending: how many of
    them it has yet to spell.
    """

    taken: list[int]
    exits: list[int]
    overlap: bytes = b""
    pending: int = 0

    @property
    def characters(self) -> int:
        """How many characters of the prompt's text the output spells again."""
        return len(self.overlap.decode("utf-8", "replace"))


def start(request: Request, vocabulary: Vocabulary) -> None:
    """Give the request a matcher for what was taken back; tokens without an alternative are the prompt's again.

    Comes before the first step, and after the request has its grammar. Raises ConstraintError as that does.
    """
    healing = request.healing
    if healing is None:
        return
    given_back = len(healing.taken)
    if request.matcher is None or not request.matcher.is_finished():
        given_back = _matcher(request, healing, vocabulary).settled
    for _ in range(given_back):
        request.tokens.append(healing.taken[0])
        enter(request, healing.taken[0], vocabulary)
    if healing.taken:
        request.matcher = _matcher(request, healing, vocabulary)


def enter(request: Request, token: int, vocabulary: Vocabulary) -> bytes | None:
    """Note a token that was just appended; returns its new text, or None if it only spells the prompt again."""
    healing = request.healing
    data = vocabulary.token_bytes[token] if token < len(vocabulary.token_bytes) else b""
    if healing is None:
        return data
    if healing.taken and token == healing.taken[0]:
        del healing.taken[0]
        request.prompt_len += 1
        request.scored_len = len(request.tokens)
        fresh = None
    else:
        if healing.taken:
            healing.overlap = b"".join(vocabulary.token_bytes[each] for each in healing.taken)
            healing.pending = len(healing.overlap)
            healing.taken.clear()
        inside = 0 < len(data) <= healing.pending
        fresh = None if inside else data[healing.pending :]
        healing.pending = max(0, healing.pending - len(data))
    if not healing.taken and not healing.pending:
        _end(request, healing)
    return fresh


def _end(request: Request, healing: Healing) -> None:
    if not healing.overlap:
        request.healing = None
    if request.grammar is None:
        request.matcher = None  # from here on anything may come


def _matcher(request: Request, healing: Healing, vocabulary: Vocabulary) -> HealingMatcher:
    before = request.tokens.view(max(0, request.prompt_len - _BEFORE)).tolist()
    spelled = vocabulary.token_bytes
    plain = next(
        (
            i
            for i in range(len(before), 0, -1)
            if not (before[i - 1] < len(spelled) and spelled[before[i - 1]])
        ),
        0,
    )
    exits = [count for count in healing.exits if count <= len(healing.taken)]
    return HealingMatcher(vocabulary, before[plain:], healing.taken, exits, request.grammar)
