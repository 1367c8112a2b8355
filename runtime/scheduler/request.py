"""One sequence being generated: its tokens, the slots it holds, its constraint and its counters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trellis.fsm.contract import Grammar, Matcher
from trellis.radix import Node
from trellis.runtime.executor.contract import SampleRow
from trellis.runtime.messages import (
    Counts,
    FinishReason,
    GenerateCommand,
    SamplingParams,
    TopLogprobs,
)
from trellis.runtime.scheduler.buffer import IntBuffer
from trellis.runtime.scheduler.healing import Healing
from trellis.runtime.scheduler.stop import StopScanner

if TYPE_CHECKING:
    from trellis.runtime.scheduler.plan import PlannedExtend

Stage = Literal["compiling", "waiting", "running", "finished"]


@dataclass(slots=True)
class CachedAt:
    """Where the cached prefix of a request ends: at ``version`` of the tree its first ``limit`` tokens had a
    prefix of ``length`` tokens, which ends at ``node`` (None: no token), or inside of its edge; and its parent."""

    version: int = -1
    limit: int = -1
    length: int = 0
    node: Node | None = None
    parent: Node | None = None
    inside: bool = False


@dataclass(eq=False, slots=True)
class Request:
    """State of one request. Positions and lengths count tokens of the whole sequence, prompt and output.

    Tokens:
        tokens: prompt, then output. prompt_len: where the output begins.
        admitted_len: tokens known when the request was (last) admitted; up to here it prefills, and what it
            computes goes into the tree at once. After that it decodes into private slots.
        max_new_tokens: as asked for, or less where the context or the pool would not hold more.
    Slots:
        slots: one a token that has a slot. The first tree_len of them belong to the tree, locked through
            ``node``; the others are private. computed: leading tokens whose K/V is computed.
        cached_at: what the tree had for it when it was last asked (see ``KVMemory.cached``). in_flight: the last
            extend that is being computed while the next step is planned; ``computed`` counts it already.
    Scores:
        scored_len: leading tokens whose logprob is settled: known, or not asked for. The next ones are scored
            by the forward pass that computes their predecessors, so the cache is not used past scored_len - 1.
    Healing:
        healing: prompt tokens that were taken back, until they have come again. prompt_len grows as they do.
    Output:
        forced_at: the output tokens (counted from 0) that were forced, ascending.
        emitted: output tokens already sent. closing: the reason to finish, once there is one.
    Sampling:
        draft: tokens that may follow; computed with the next extend (see ``draft.py``). sample_row: the row of its
        last token, kept from step to step. penalised: what it draws depends on the tokens before. scores: it wants
        logprobs of known tokens. ends: ids after which it stops, besides EOS.
    Counting:
        accounted: leading prompt tokens already counted as cached or computed. reached: leading tokens that
        were computed at some time, also before a retraction.
    """

    rid: str
    params: SamplingParams
    tokens: IntBuffer
    prompt_len: int
    max_new_tokens: int
    seed: int
    arrival: float
    order: int
    namespace: str = ""
    priority: int = 0
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start: int = -1
    jump_forward: bool = True
    stream: bool = True
    stage: Stage = "waiting"
    grammar: Grammar | None = None
    matcher: Matcher | None = None
    healing: Healing | None = None

    admitted_len: int = 0
    slots: IntBuffer = field(default_factory=IntBuffer)
    node: Node | None = None
    tree_len: int = 0
    computed: int = 0
    in_flight: PlannedExtend | None = None
    cached_at: CachedAt = field(default_factory=CachedAt)

    scored_len: int = 0
    input_logprobs: list[float | None] | None = None
    input_top_logprobs: list[TopLogprobs | None] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)

    forced_at: list[int] = field(default_factory=list)
    closing: FinishReason | None = None
    emitted: int = 0
    announced: bool = False
    inputs_sent: bool = False

    accounted: int = 0
    reached: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    forward_passes: int = 0
    retractions: int = 0
    draft: Sequence[int] = ()
    sample_row: SampleRow | None = None
    penalised: bool = field(init=False)
    ends: frozenset[int] = field(init=False)
    scores: bool = field(init=False)
    scanner: StopScanner = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        self.scanner = StopScanner(params.stop, params.stop_regex)
        self.penalised = bool(
            params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
        )
        self.ends = frozenset(params.stop_token_ids)
        self.scores = self.return_logprob or self.logprob_start >= 0
        self.scored_len = self.prompt_len
        if self.logprob_start >= 0:
            self.scored_len = min(max(self.logprob_start, 1), self.prompt_len)
            self.input_logprobs = [None] if self.logprob_start == 0 else []
            self.input_top_logprobs = [None] if self.logprob_start == 0 else []
        if self.max_new_tokens == 0:
            self.closing = FinishReason("length")

    @staticmethod
    def from_command(
        command: GenerateCommand, max_new_tokens: int, seed: int, arrival: float, order: int
    ) -> Request:
        prompt_len = len(command.token_ids) - max(command.healing, default=0)
        taken = command.token_ids[prompt_len:]
        return Request(
            rid=command.rid,
            params=command.params,
            tokens=IntBuffer(command.token_ids[:prompt_len]),
            prompt_len=prompt_len,
            healing=Healing(taken, command.healing) if taken else None,
            max_new_tokens=max_new_tokens,
            seed=seed,
            arrival=arrival,
            order=order,
            namespace=command.namespace,
            priority=command.priority,
            return_logprob=command.return_logprob,
            top_logprobs_num=command.top_logprobs_num if command.return_logprob else 0,
            logprob_start=command.logprob_start,
            jump_forward=command.jump_forward,
            stream=command.stream,
        )

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def forced_tokens(self) -> int:
        return len(self.forced_at)

    def forced_flags(self, start: int, stop: int) -> list[bool] | None:
        """Whether each of the output tokens [start, stop) was forced; None when none of them was."""
        found = self.forced_at[bisect_left(self.forced_at, start) : bisect_left(self.forced_at, stop)]
        if not found:
            return None
        flags = [False] * (stop - start)
        for index in found:
            flags[index - start] = True
        return flags

    @property
    def prefilling(self) -> bool:
        return self.computed < self.admitted_len and self.computed < self.target

    @property
    def private(self) -> int:
        """Tokens whose slots this request alone owns."""
        return len(self.slots) - self.tree_len

    @property
    def target(self) -> int:
        """How many leading tokens have to be computed before the next decision.

        All of them, as the last one's logits give the next token. When the request ends here no next token is
        wanted: what is left to compute is the prompt, and the predecessors of tokens that want a logprob.
        """
        if self.closing is None:
            return len(self.tokens)
        return max(self.prompt_len, len(self.tokens) - 1) if self.return_logprob else self.prompt_len

    @property
    def score_end(self) -> int:
        """Tokens before this position want a logprob (if they are at or after scored_len)."""
        if self.return_logprob:
            return len(self.tokens)
        return self.prompt_len if self.logprob_start >= 0 else 0

    @property
    def match_limit(self) -> int:
        """Longest prefix that may come from the cache: at least one token is computed, and every token that
        still needs a logprob has its predecessor computed."""
        limit = self.target - 1
        return min(limit, self.scored_len - 1) if self.scored_len < self.score_end else limit

    def score_span(self, start: int, end: int) -> tuple[int, int]:
        """Tokens [first, last) whose logprobs the computation of positions [start, end) gives."""
        first = max(self.scored_len, start + 1)
        return first, max(first, min(end + 1, self.score_end))

    @property
    def settled(self) -> bool:
        """It can finish: there is a reason, the prompt is computed, and so is every logprob asked for."""
        return (
            self.closing is not None
            and self.computed >= self.prompt_len
            and self.scored_len >= self.score_end
        )

    def ground(self) -> None:
        """What is being computed for the request will not be looked at: it ends, or starts anew, before that."""
        if self.in_flight is not None:
            self.computed = min(self.computed, self.in_flight.start)
            self.in_flight = None

    def account(self, end: int, cached: bool) -> int:
        """Note that the tokens before ``end`` were found in the cache, or computed; returns how many of them
        are prompt tokens seen for the first time. A request that comes back after a retraction counts nothing
        twice, so cached_tokens + computed prompt tokens = prompt_len in the end."""
        fresh = max(0, min(end, self.prompt_len) - self.accounted)
        self.accounted += fresh
        if cached:
            self.cached_tokens += fresh
        return fresh

    def counts(self) -> Counts:
        return Counts(
            prompt_tokens=self.prompt_len,
            cached_tokens=self.cached_tokens,
            completion_tokens=len(self.tokens) - self.prompt_len,
            sampled_tokens=self.sampled_tokens,
            forced_tokens=len(self.forced_at),
            forward_passes=self.forward_passes,
            retractions=self.retractions,
        )
