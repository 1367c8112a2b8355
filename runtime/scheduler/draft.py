"""Drafts: tokens that a constraint makes likely, checked by the model in the pass that computes them.

Where forced bytes end, their last token is often not forced, as it may be spelled together with what follows. But
the model nearly always spells it alone. So it is computed along with the tokens before it, and if the sampler then
chooses it, one forward pass gave two tokens (speculative decoding, Leviathan et al. 2023, arXiv:2211.17192, with the
constraint as the draft model). The ids are those of a run without drafts: every token is sampled from its own
logits, with its own mask and its own random number, and a draft that was not chosen leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence

from trellis.runtime.scheduler.plan import NOTHING, PlannedExtend
from trellis.runtime.scheduler.request import Request


def propose(request: Request) -> Sequence[int]:
    """What to compute beyond the request's tokens in its next extend.

    Nothing if logprobs are wanted, as a token that turns out to be forced would then need its own; and nothing
    where other tokens are forbidden after the draft than before it (min_new_tokens of a healed free text).
    """
    if request.matcher is None or request.closing is not None or not request.jump_forward:
        return NOTHING
    if request.return_logprob or (request.grammar is None and request.params.min_new_tokens):
        return NOTHING
    room = request.max_new_tokens - request.n_output - 1
    return request.matcher.draft()[:room] if room > 0 else NOTHING


def verified(extend: PlannedExtend) -> int:
    """How many tokens of the draft are what has come since."""
    tokens, end = extend.request.tokens, extend.end
    known = len(tokens) - end
    for index, token in enumerate(extend.draft):
        if index >= known or tokens.at(end + index) != token:
            return index
    return len(extend.draft)
