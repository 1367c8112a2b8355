"""What one new token does to its request: the matcher moves, forced runs follow, something may end it.

Order of the checks after every token (sampled or forced): is it a possible id at all; does the constraint
allow it; stop strings; EOS and stop tokens; the constraint is complete; max_new_tokens. Completeness stands
before the length, because text that satisfies its constraint was not cut, even if it is as long as allowed.

With a constraint EOS is decided by the constraint alone: min_new_tokens and ignore_eos do not apply, as the
first could forbid the only token there is and the second go on after the end. Stop tokens other than EOS
still end the request, where the constraint lets them come.
"""

from __future__ import annotations

from trellis.errors import ConstraintError, TrellisError
from trellis.fsm.contract import Vocabulary
from trellis.runtime.executor.contract import NO_TOKEN
from trellis.runtime.messages import FinishReason, TopLogprobs
from trellis.runtime.scheduler.draft import propose
from trellis.runtime.scheduler.healing import enter
from trellis.runtime.scheduler.request import Request


def begin(request: Request, vocabulary: Vocabulary) -> None:
    """Before anything is sampled: a constraint may already leave no choice.

    The forced tokens are output; they are computed together with the prompt. Raises ConstraintError.
    """
    if request.matcher is None or request.closing is not None:
        return
    if request.matcher.is_finished():
        request.closing = FinishReason("stop")
    else:
        _jump(request, vocabulary)


def accept_sampled(
    request: Request,
    token: int,
    logprob: float | None,
    top: TopLogprobs | None,
    vocabulary: Vocabulary,
) -> None:
    """Append a sampled token and what is forced after it; sets ``closing`` when the request ends with it.

    Raises TrellisError (ConstraintError when the constraint refuses the token); the request then stands as
    before the token that was refused.
    """
    if _is_plain(request):
        _take_plain(request, token, vocabulary)
        return
    if request.return_logprob and logprob is None:
        raise TrellisError(f"the sampler gave no logprob for token {token}")
    if _take(request, token, vocabulary):
        request.sampled_tokens += 1
        if request.return_logprob and logprob is not None:
            request.logprobs.append(logprob)
            request.top_logprobs.append(top or [])
            request.scored_len = len(request.tokens)
    if request.closing is None and request.matcher is not None:
        _jump(request, vocabulary)
    request.draft = propose(request)


def _is_plain(request: Request) -> bool:
    """Nothing looks at its tokens but for their ids."""
    return (
        request.grammar is None
        and request.healing is None
        and not request.scanner.looks
        and not request.scores
    )


def _take_plain(request: Request, token: int, vocabulary: Vocabulary) -> None:
    """What ``_take`` comes to for a plain request, of which there may be hundreds in a step: a fifth of its cost."""
    if not 0 <= token < vocabulary.size:
        raise _impossible(token, vocabulary)
    request.tokens.append(token)
    request.sampled_tokens += 1
    if token in request.ends or (token in vocabulary.eos_token_ids and not request.params.ignore_eos):
        request.closing = FinishReason("stop", matched=token)
    elif len(request.tokens) - request.prompt_len >= request.max_new_tokens:
        request.closing = FinishReason("length")


def _impossible(token: int, vocabulary: Vocabulary) -> TrellisError:
    if token == NO_TOKEN:
        return TrellisError("the logits of this position have no finite best: nothing can be sampled")
    return TrellisError(f"the sampler gave token {token}; the vocabulary has {vocabulary.size} ids")


def _jump(request: Request, vocabulary: Vocabulary) -> None:
    if request.matcher is None or not request.jump_forward:
        return
    for token in request.matcher.forced():
        if _take(request, token, vocabulary):
            request.forced_at.append(request.n_output - 1)
        if request.closing is not None:
            return


def _take(request: Request, token: int, vocabulary: Vocabulary) -> bool:
    """Append the token; False: it is one of the prompt's that was taken back, and no output."""
    if not 0 <= token < vocabulary.size:
        raise _impossible(token, vocabulary)
    is_eos = token in vocabulary.eos_token_ids
    matcher = request.matcher
    if matcher is not None and not (matcher.is_accepting() if is_eos else matcher.accept(token)):
        raise ConstraintError(
            "constraint",
            "internal",
            f"output token {request.n_output}",
            f"the constraint does not allow token {token} here",
        )
    n_output = request.n_output
    request.tokens.append(token)
    text = enter(request, token, vocabulary)
    if text is not None:
        request.closing = _reason_to_stop(request, token, is_eos, text)
    elif request.n_output >= request.max_new_tokens:
        request.closing = FinishReason("length")  # inside the bytes taken back, which it spells otherwise
    return request.n_output > n_output


def _reason_to_stop(request: Request, token: int, is_eos: bool, text: bytes) -> FinishReason | None:
    if not text and not request.params.skip_special_tokens:
        request.scanner.reset()  # a special token that is shown stands between the texts around it
    stop_string = request.scanner.push(text)
    if stop_string is not None:
        return FinishReason("stop", matched=stop_string)
    ends = is_eos and (request.grammar is not None or not request.params.ignore_eos)
    if ends or token in request.ends:
        return FinishReason("stop", matched=token)
    if request.matcher is not None and request.matcher.is_finished():
        return FinishReason("stop")
    if request.n_output >= request.max_new_tokens:
        return FinishReason("length")
    return None


def forbidden_tokens(request: Request, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Ids that may not come yet: what would end the request before min_new_tokens."""
    params = request.params
    if request.grammar is not None or request.n_output >= min(params.min_new_tokens, request.max_new_tokens):
        return ()
    eos = () if params.ignore_eos else tuple(vocabulary.eos_token_ids)
    again = request.healing.taken[:1] if request.healing is not None else ()
    return (*eos, *(token for token in params.stop_token_ids if token not in again))
