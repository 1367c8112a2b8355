"""The plain data that crosses process boundaries (msgpack through msgspec).

Down: ``GenerateCommand``s (a list arrives as one message and is seen by one scheduler step) and
``AbortCommand``s, from the TokenizerManager to the Scheduler. Up: ``TokenOutput`` from the Scheduler to the
Detokenizer, ``TextOutput`` from there to the TokenizerManager. One message is always a list of structs.
"""

from __future__ import annotations

import msgspec

TopLogprobs = list[tuple[int, float]]  # (token id, logprob), best first


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample one request. Values are already validated (runtime/manager/validation.py).

    temperature 0 is greedy. top_k -1 is off. max_new_tokens 0 computes the prompt and samples nothing.
    stop: strings; they and everything after them are cut from the text. stop_token_ids: besides EOS.
    stop_regex: as stop, for what matches a pattern; the match that is complete first, and of those the longest.
    seed: None draws a random one; the same seed gives the same text in any batch.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: list[str] = []
    stop_regex: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None


class Constraint(msgspec.Struct, frozen=True):
    """A ``trellis.fsm.ConstraintSpec`` on the wire."""

    kind: str  # regex | choices | schema | grammar
    source: str
    spacing: str = "spaced"  # spaced | compact | any
    strict: bool = True


class GenerateCommand(msgspec.Struct, kw_only=True, tag=True):
    """One sequence to generate.

    token_ids: the prompt, at least one token.
    healing: how many of the last tokens may be taken back and written again, each number a place where another
        token may come instead; ascending, less than all of them. Those are ordinary text. Empty: none.
    logprob_start: position of the first prompt token whose logprob is wanted; -1 for none. Position 0 has no
        predecessor, so its logprob is None.
    namespace: cached prefixes are shared only inside one namespace.
    stream: somebody wants every token at once; else they come some at a time.
    """

    rid: str
    token_ids: list[int]
    params: SamplingParams
    constraint: Constraint | None = None
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start: int = -1
    namespace: str = ""
    priority: int = 0
    jump_forward: bool = True
    stream: bool = True
    healing: list[int] = []


class AbortCommand(msgspec.Struct, tag=True):
    """End the request with exactly this id; unknown ids are ignored (it may have just finished)."""

    rid: str


class FinishReason(msgspec.Struct, frozen=True):
    """type: ``stop`` (EOS, stop token or string, or the grammar is complete) | ``length`` | ``abort`` | ``error``.

    matched: the stop string, the stop regex or the token id. message, status: for ``abort`` and ``error``; status is the HTTP
    status that a client should see (400 the client's mistake, 500 ours, 503 try again). code: of a
    ``ConstraintError``.
    """

    type: str
    matched: str | int | None = None
    message: str | None = None
    status: int | None = None
    code: str | None = None


class Counts(msgspec.Struct, kw_only=True):
    """Where the tokens of one request came from; complete in its last output.

    prompt_tokens = cached_tokens + computed prompt tokens. completion_tokens = sampled + forced. A prompt token
    that was taken back (healing) is a prompt token if it came again; else the first token of the output spells it.
    forward_passes: batches this request took part in.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0
    forward_passes: int = 0
    retractions: int = 0


class GrammarReport(msgspec.Struct, frozen=True):
    """What there is to know about the constraint of a finished request.

    engine: that enforced it. warnings: one sentence each. validated_only: what could not be enforced token by
    token (``strict`` is off) and was only validated in the finished text; if that failed, a warning says so.
    """

    engine: str
    warnings: list[str] = []
    validated_only: list[str] = []


class DetokenizeOptions(msgspec.Struct, frozen=True):
    """Rides on the first output of a request, so that the Detokenizer needs no other channel.

    skip_characters: so many at the start are the prompt's (see ``TextOutput.healed_characters``).
    """

    stop: list[str]
    skip_special_tokens: bool
    skip_characters: int = 0
    stop_regex: list[str] = []


class TokenOutput(msgspec.Struct, kw_only=True):
    """New tokens of one request after one step.

    logprobs, top_logprobs: one entry a new token, when asked for: the model's own log-softmax (before
    temperature, penalties and masks). input_logprobs: prompt tokens from logprob_start on, once, on the first
    output after the prompt was computed; input_top_logprobs: their alternatives, when some were asked for. A stop *token* is in token_ids (and counted) but has no text.
    forced: one entry a new token, whether the constraint left no other; None when none of them was forced.
    grammar: on the last output of a request with a constraint.
    """

    rid: str
    token_ids: list[int]
    counts: Counts
    options: DetokenizeOptions | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    input_logprobs: list[float | None] | None = None
    input_top_logprobs: list[TopLogprobs | None] | None = None
    finish: FinishReason | None = None
    forced: list[bool] | None = None
    grammar: GrammarReport | None = None


class TextOutput(msgspec.Struct, kw_only=True):
    """``TokenOutput`` with its text.

    text: the new text that is safe to show: whole characters, nothing that may become a stop string.
    forced_spans: the parts text[start:end] that come from forced tokens, in order, not touching each other. A
    character of several tokens comes from the one that completes it.
    kept_tokens, tail_text (last output only): the first kept_tokens output tokens spell the final text but for
    tail_text, which a cut inside a token left over. A program goes on from these tokens, so that what it adds
    next finds their K/V in the cache.
    healed_characters: the request's tokens begin with so many characters that end the prompt's text; they are in
    no text. A program takes them off its own text when it goes on from the tokens.
    """

    rid: str
    text: str
    token_ids: list[int]
    counts: Counts
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    input_logprobs: list[float | None] | None = None
    input_top_logprobs: list[TopLogprobs | None] | None = None
    finish: FinishReason | None = None
    forced_spans: list[tuple[int, int]] = []
    grammar: GrammarReport | None = None
    kept_tokens: int = 0
    tail_text: str = ""
    healed_characters: int = 0
