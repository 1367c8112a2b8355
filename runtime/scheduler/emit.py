"""Builds the messages that go up: new tokens of a request, or that it was not taken."""

from __future__ import annotations

from trellis.runtime.messages import (
    Counts,
    DetokenizeOptions,
    FinishReason,
    GenerateCommand,
    GrammarReport,
    TokenOutput,
)
from trellis.runtime.scheduler.request import Request

EVERY = 8  # tokens at a time, where nobody streams; so many may be missing in what an abort gives


def is_due(request: Request) -> bool:
    """Whether a request that goes on has enough to send."""
    return request.stream or len(request.tokens) - request.prompt_len - request.emitted >= EVERY


def emit(
    request: Request, finish: FinishReason | None = None, grammar: GrammarReport | None = None
) -> TokenOutput | None:
    """What is new since the last output; None when that is nothing and the request goes on.

    Where logprobs were asked for, a token is sent when its logprob is known: a forced token one step after it
    was appended, with the forward pass that computes it. So tokens and logprobs always stand together.
    Nothing is sent before the prompt is computed.
    """
    prompt = request.prompt_len
    if finish is None and request.computed < prompt and request.emitted == 0:
        return None
    start, stop = request.emitted, len(request.tokens) - prompt
    inputs = None
    if request.scores:
        inputs = _new_inputs(request)
        if request.return_logprob:
            stop = max(start, min(stop, request.scored_len - prompt))
    if start == stop and inputs is None and finish is None:
        return None
    request.emitted = stop
    if request.announced and finish is None and not request.scores and not request.forced_at:
        return TokenOutput(  # nearly all of them; the other fields would double its cost
            rid=request.rid,
            token_ids=request.tokens.view(prompt + start, prompt + stop).tolist(),
            counts=request.counts(),
        )
    options = None if request.announced else _options(request)
    request.announced = True
    return TokenOutput(
        rid=request.rid,
        token_ids=request.tokens.view(prompt + start, prompt + stop).tolist(),
        counts=request.counts(),
        options=options,
        logprobs=request.logprobs[start:stop] if request.return_logprob else None,
        top_logprobs=request.top_logprobs[start:stop] if request.top_logprobs_num else None,
        input_logprobs=inputs,
        input_top_logprobs=request.input_top_logprobs if inputs and request.top_logprobs_num else None,
        finish=finish,
        forced=request.forced_flags(start, stop) if request.forced_at else None,
        grammar=grammar,
    )


def refuse(command: GenerateCommand, message: str, status: int) -> TokenOutput:
    """The only output of a request that was not taken."""
    return TokenOutput(
        rid=command.rid,
        token_ids=[],
        counts=Counts(prompt_tokens=len(command.token_ids)),
        options=DetokenizeOptions(command.params.stop, command.params.skip_special_tokens),
        finish=FinishReason("abort", message=message, status=status),
    )


def _new_inputs(request: Request) -> list[float | None] | None:
    """The prompt's logprobs, once, when all are there."""
    if request.inputs_sent or request.input_logprobs is None:
        return None
    if request.scored_len < request.prompt_len or request.computed < request.prompt_len:
        return None
    request.inputs_sent = True
    return request.input_logprobs


def _options(request: Request) -> DetokenizeOptions:
    healed = request.healing.characters if request.healing is not None else 0
    params = request.params
    return DetokenizeOptions(params.stop, params.skip_special_tokens, healed, params.stop_regex)
