"""API speculative execution: several gens of a program out of one call (see ``surplus`` for when that is exact)."""

from __future__ import annotations

from dataclasses import replace

from trellis.frontend.backends.base import Completion, GenerateRequest
from trellis.frontend.backends.surplus import Surplus, Taken, cut, drawn_with, speculates, take


def from_surplus(request: GenerateRequest) -> Completion | None:
    """The answer, if an earlier call has already written it: no call, no tokens."""
    if request.surplus is None or not _plain(request):
        return None
    taken = take(request.surplus, request.sampling)
    if taken is None:
        return None
    return Completion(
        text=taken.text,
        finish_reason=taken.finish_reason,
        matched=taken.matched,
        surplus=taken.rest,
        saved_prompt_tokens=request.surplus.prompt_tokens,
    )


def longer(request: GenerateRequest) -> GenerateRequest | None:
    """The request that writes on past the gen's end, and tells where tokens begin; None for one that must not."""
    if request.spec_tokens <= 0 or not _plain(request) or not speculates(request.sampling):
        return None
    tokens = max(request.sampling.max_new_tokens, request.spec_tokens)
    sampling = replace(request.sampling, max_new_tokens=tokens, stop=())
    return replace(request, sampling=sampling, return_logprob=True, surplus=None)


def divided(request: GenerateRequest, whole: Completion, tokens: tuple[str, ...]) -> Completion:
    """The gen's own part of the longer answer. tokens: texts of its tokens. The counts stay those of the call."""
    ended = whole.finish_reason == "stop"
    if ended and tokens and not tokens[-1]:
        tokens = tokens[:-1]  # the token that ended it
    surplus = Surplus(
        tokens=tokens,
        ended=ended,
        sampling=drawn_with(request.sampling),
        prompt_tokens=whole.counts.prompt_tokens,
    )
    sampling = request.sampling
    taken = cut(surplus, sampling.stop, sampling.max_new_tokens)
    if taken is None:  # the server ended it early: the context is full
        taken = Taken(whole.text, "length", None, len(tokens), None)
    return replace(
        whole,
        text=taken.text,
        finish_reason=taken.finish_reason,
        matched=taken.matched,
        surplus=taken.rest,
        token_ids=(),
        logprobs=None,
    )


def _plain(request: GenerateRequest) -> bool:
    return request.constraint is None and not request.return_logprob
