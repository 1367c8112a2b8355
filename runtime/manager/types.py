"""What the TokenizerManager takes and gives: plain data of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trellis.runtime.manager.truncation import truncation_warning
from trellis.runtime.messages import (
    Constraint,
    Counts,
    FinishReason,
    GrammarReport,
    SamplingParams,
    TextOutput,
    TopLogprobs,
)

Segment = str | Sequence[int]
Prompt = str | Sequence[int] | Sequence[Segment]


@dataclass(frozen=True, kw_only=True)
class GenerateInput:
    """One sequence to generate.

    prompt: text, token ids, or segments: texts and lists of token ids that follow each other.
    until_context: ignore params.max_new_tokens, go on until the context is full.
    jump_forward: False samples forced tokens one by one, for measurements; the ids are the same.
    strict_length: refuse a max_new_tokens that the context has no room for; otherwise the output ends early,
        with finish reason ``length``. Where prompts may be cut, one with this flag makes room for all of them.
    logprob_start: position of the first prompt token whose logprob is wanted; -1 for none.
    namespace: cached prefixes are shared only inside one namespace.
    rid: the name by which the caller may abort it; several inputs of one call may share it.
    token_healing: take back the last tokens of a prompt that ends in text, where a longer token could stand there
        (see runtime/manager/healing.py). Not for a prompt whose own logprobs are asked for, and no token ids.
    prompt_field: what the client called the prompt, for error messages.
    params_checked: params are known to be good (they come from runtime/manager/validation.py).
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    constraint: Constraint | None = None
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start: int = -1
    namespace: str = ""
    rid: str | None = None
    jump_forward: bool = True
    until_context: bool = False
    strict_length: bool = False
    token_healing: bool = False
    prompt_field: str = "prompt"
    params_checked: bool = False

    @property
    def heals(self) -> bool:
        """Whether tokens may be taken back: something is generated, and nobody asks about the prompt's own tokens."""
        generates = self.until_context or self.params.max_new_tokens > 0
        return self.token_healing and generates and self.logprob_start < 0


@dataclass(kw_only=True)
class GenerateResult:
    """New output of one request (a delta), or the sum of all its deltas; ``finish`` is set at the end.

    forced_spans: the parts text[start:end] that come from forced tokens, in order, not touching each other.
    grammar: at the end of a request with a constraint.
    logprobs, top_logprobs: one entry an output token, when asked for. input_logprobs: aligned with
    input_token_ids, the prompt's tokens from logprob_start on; so is input_top_logprobs, when asked for. kept_tokens, tail_text, healed_characters: see
    ``TextOutput``.
    latency_s: seconds since the request was sent. truncated_tokens: how many the prompt lost at its beginning because it was
    too long.
    """

    rid: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    input_token_ids: list[int] | None = None
    input_logprobs: list[float | None] | None = None
    input_top_logprobs: list[TopLogprobs | None] | None = None
    finish: FinishReason | None = None
    forced_spans: list[tuple[int, int]] = field(default_factory=list)
    grammar: GrammarReport | None = None
    kept_tokens: int = 0
    tail_text: str = ""
    healed_characters: int = 0
    latency_s: float = 0.0
    truncated_tokens: int = 0

    @property
    def warnings(self) -> list[str]:
        """What the client should know about the answer."""
        return [truncation_warning(self.truncated_tokens)] if self.truncated_tokens else []

    def add(self, later: GenerateResult) -> None:
        """Append a later delta of the same request."""
        self._add_spans(later)
        self.text += later.text
        self.token_ids += later.token_ids
        self.counts = later.counts
        if later.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += later.logprobs
        if later.top_logprobs is not None:
            self.top_logprobs = self.top_logprobs or []
            self.top_logprobs += later.top_logprobs
        if later.input_logprobs is not None:
            self.input_logprobs, self.input_token_ids = later.input_logprobs, later.input_token_ids
            self.input_top_logprobs = later.input_top_logprobs
        self.finish, self.grammar = later.finish, later.grammar
        self.kept_tokens, self.tail_text = later.kept_tokens, later.tail_text
        self.healed_characters = max(self.healed_characters, later.healed_characters)
        self.latency_s = later.latency_s

    def _add_spans(self, later: GenerateResult) -> None:
        shift = len(self.text)
        for start, end in later.forced_spans:
            joins = bool(self.forced_spans) and self.forced_spans[-1][1] == start + shift
            first = self.forced_spans.pop()[0] if joins else start + shift
            self.forced_spans.append((first, end + shift))

    @staticmethod
    def from_output(rid: str, output: TextOutput, latency_s: float) -> GenerateResult:
        return GenerateResult(
            rid=rid,
            text=output.text,
            token_ids=list(output.token_ids),
            counts=output.counts,
            logprobs=output.logprobs,
            top_logprobs=output.top_logprobs,
            input_logprobs=output.input_logprobs,
            input_top_logprobs=output.input_top_logprobs,
            finish=output.finish,
            forced_spans=list(output.forced_spans),
            grammar=output.grammar,
            kept_tokens=output.kept_tokens,
            tail_text=output.tail_text,
            healed_characters=output.healed_characters,
            latency_s=latency_s,
        )


@dataclass(frozen=True)
class OptionScore:
    """One option: its tokens after the boundary that all options share, and their logprobs.

    unconditional: the logprobs of the same tokens without the prompt, if asked for; 0 for a first token that nothing
    at all stands before.
    """

    token_ids: list[int]
    logprobs: list[float]
    unconditional: list[float] | None = None


@dataclass(frozen=True)
class ScoreOutput:
    """One ``OptionScore`` an option, in order; counts are summed over the options."""

    options: list[OptionScore]
    counts: Counts
