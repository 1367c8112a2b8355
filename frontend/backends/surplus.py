"""Text that an API wrote beyond the end of a gen, and how the gens that follow are answered out of it.

One call without stop strings writes on past the first gen. What the program appends next is compared with what
came: as long as it is the same, and ends where a token of the API ends, the next gen's text is already there, token
for token what the model wrote after exactly that text. Anything else drops the surplus, and the next gen is a call
of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trellis.frontend.backends.base import SamplingOptions


@dataclass(frozen=True)
class Surplus:
    """tokens: texts of the tokens that are left. partial: the first is only the rest of one.

    ended: after them the model ended its text; otherwise they were cut at the limit of the call.
    sampling: what they were drawn with, without lengths and stop strings.
    prompt_tokens: how many a call that goes on from here would send.
    """

    tokens: tuple[str, ...]
    ended: bool
    sampling: SamplingOptions
    prompt_tokens: int
    partial: bool = False

    def after(self, text: str) -> Surplus | None:
        """What is left when the program writes ``text`` next; None if that is not what the API wrote, or if it ends
        inside a token."""
        if not text:
            return self
        at = 0
        for used, token in enumerate(self.tokens, start=1):
            if not text.startswith(token, at):
                return None
            at += len(token)
            if at == len(text):
                rest = replace(self, tokens=self.tokens[used:], partial=False)
                return replace(rest, prompt_tokens=self.prompt_tokens + used)
        return None


@dataclass(frozen=True)
class Taken:
    """A gen's part of some tokens. rest: what came after it; None if nothing did. used: its tokens."""

    text: str
    finish_reason: str
    matched: str | None
    used: int
    rest: Surplus | None


def speculates(sampling: SamplingOptions) -> bool:
    """Whether text that was drawn on past a gen's end is what a call of its own would draw.

    Not with a seed (a new call begins its random numbers anew), nor with penalties and minimal lengths, which count
    the tokens of one answer.
    """
    plain = (
        sampling.min_new_tokens == 0
        and sampling.frequency_penalty == sampling.presence_penalty == 0
        and sampling.repetition_penalty == 1
        and not sampling.stop_token_ids
        and not sampling.stop_regex
        and not sampling.ignore_eos
    )
    return plain and sampling.max_new_tokens > 0 and (sampling.seed is None or sampling.temperature == 0)


def drawn_with(sampling: SamplingOptions) -> SamplingOptions:
    """The sampling parameters that have to be equal: all but where the text ends."""
    return replace(sampling, max_new_tokens=0, stop=())


def take(surplus: Surplus, sampling: SamplingOptions) -> Taken | None:
    """A gen's text out of the surplus; None if it would have been drawn otherwise or does not end in it."""
    if surplus.partial or surplus.sampling != drawn_with(sampling) or not speculates(sampling):
        return None
    return cut(surplus, sampling.stop, sampling.max_new_tokens)


def cut(surplus: Surplus, stops: Sequence[str], max_tokens: int) -> Taken | None:
    """The text up to its first stop string or its limit, as it would have ended had it been watched token by token.
    None if the tokens end before the text does."""
    text = ""
    longest = max((len(stop) for stop in stops), default=0)
    for used, token in enumerate(surplus.tokens, start=1):
        start = max(0, len(text) - longest + 1)
        text += token
        found = [(at, stop) for stop in stops if (at := text.find(stop, start)) >= 0]
        if found:
            at, stop = min(found)
            return Taken(text[:at], "stop", stop, used, _rest_after(surplus, at))
        if used == max_tokens:
            rest = replace(surplus, tokens=surplus.tokens[used:], partial=False)
            return Taken(text, "length", None, used, _counted(rest, surplus, used))
    return Taken(text, "stop", None, len(surplus.tokens), None) if surplus.ended else None


def _rest_after(surplus: Surplus, end: int) -> Surplus:
    """What follows the first ``end`` characters: the stop string, which a program may write, and all after it."""
    at = index = 0
    while at + len(surplus.tokens[index]) <= end:
        at += len(surplus.tokens[index])
        index += 1
    partial = at < end
    first = surplus.tokens[index][end - at :]
    rest = replace(surplus, tokens=(first, *surplus.tokens[index + 1 :]), partial=partial)
    return _counted(rest, surplus, index + partial)


def _counted(rest: Surplus, before: Surplus, used: int) -> Surplus:
    return replace(rest, prompt_tokens=before.prompt_tokens + used)
