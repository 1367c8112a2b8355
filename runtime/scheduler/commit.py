"""Enters what a step computed into its requests: tokens, logprobs, matchers, reasons to finish."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trellis.errors import ConstraintError, TrellisError
from trellis.fsm.contract import Vocabulary
from trellis.fsm.search import STOP_REGEX
from trellis.runtime.messages import FinishReason
from trellis.runtime.scheduler.advance import accept_sampled
from trellis.runtime.scheduler.counters import Counters
from trellis.runtime.scheduler.draft import verified
from trellis.runtime.scheduler.plan import PlannedExtend
from trellis.runtime.scheduler.request import Request

logger = logging.getLogger(__name__)


def commit(extends: Sequence[PlannedExtend], vocabulary: Vocabulary, counters: Counters) -> None:
    """Enter the results of the extends. What fails for one request ends that request alone."""
    for extend in extends:
        request = extend.request
        _enter_computed(extend, counters)
        if extend.scores:
            _enter_scores(extend)
        sampled_before, forced_before = request.sampled_tokens, len(request.forced_at)
        try:
            if extend.fault is not None:
                raise extend.fault
            if extend.drawn:
                _enter_drawn(extend, vocabulary)
                if extend.draft:
                    _enter_draft(extend, vocabulary, counters)
        except Exception as error:
            fail(request, error)
        counters.sampled_tokens += request.sampled_tokens - sampled_before
        counters.forced_tokens += len(request.forced_at) - forced_before


def fail(request: Request, error: Exception) -> None:
    """The request ends here, with what it has."""
    if not isinstance(error, TrellisError):
        logger.error("request %s failed", request.rid, exc_info=error)
    message = str(error) if isinstance(error, TrellisError) else f"{type(error).__name__}: {error}"
    # A stop pattern that costs too much in this text is the client's mistake, which could not be seen before.
    costly = isinstance(error, ConstraintError) and error.kind == STOP_REGEX
    code = error.code if isinstance(error, ConstraintError) else None
    request.closing = FinishReason("error", message=message, status=400 if costly else 500, code=code)


def _enter_computed(extend: PlannedExtend, counters: Counters) -> None:
    request = extend.request
    request.computed = max(request.computed, extend.end)  # more, if a later step is being computed
    request.forward_passes += 1
    if extend.start >= request.reached and request.accounted == request.prompt_len:
        request.reached = extend.end
        return
    counters.cached_tokens += request.account(extend.start, cached=True)
    computed = request.account(extend.end, cached=False)
    counters.computed_prompt_tokens += computed
    again = max(0, min(extend.end, request.reached) - extend.start)
    counters.recomputed_tokens += again
    request.reached = max(request.reached, extend.end)


def _enter_scores(extend: PlannedExtend) -> None:
    request = extend.request
    for logprob, top in extend.scores:
        if request.scored_len < request.prompt_len:
            if request.input_logprobs is not None:
                request.input_logprobs.append(logprob)
                request.input_top_logprobs.append(top[: request.top_logprobs_num])
        else:
            request.logprobs.append(logprob)
            request.top_logprobs.append(top[: request.top_logprobs_num])
        request.scored_len += 1


def _enter_drawn(extend: PlannedExtend, vocabulary: Vocabulary) -> None:
    token, logprob, top = extend.drawn[0]
    accept_sampled(extend.request, token, logprob, top, vocabulary)


def _enter_draft(extend: PlannedExtend, vocabulary: Vocabulary, counters: Counters) -> None:
    """Go on for as long as what was sampled is what the draft said: the logits after it are then right, too.

    Tokens of the draft may also come as forced ones, once those before them stand. What was computed of the draft
    in vain is computed anew: its slots are behind ``computed``.
    """
    request, end = extend.request, extend.end
    for index in range(1, len(extend.drawn)):
        if request.closing is not None or verified(extend) < index:
            break
        if len(request.tokens) == end + index:
            token, logprob, top = extend.drawn[index]
            accept_sampled(request, token, logprob, top, vocabulary)
    right = verified(extend)
    # The last token's logits are wanted again if the step did not sample from them.
    known = len(request.tokens) - (request.closing is None)
    request.computed = request.reached = min(end + right, known)
    counters.computed_prompt_tokens += request.account(request.computed, cached=False)
    counters.drafted_tokens += len(extend.draft)
    counters.accepted_draft_tokens += right
