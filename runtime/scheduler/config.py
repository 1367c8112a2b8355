"""What the scheduler can be told: limits, budgets and policies, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerConfig:
    """All limits are in tokens unless the name says otherwise. Raises ValueError when one makes no sense.

    max_total_tokens: slots in the KV pool. What is no whole page of them is not used, see ``capacity``.
    context_length: most tokens (prompt and output) in one sequence.
    max_running_requests: most requests that hold slots at one time.
    max_queued_requests: most requests that wait (for a place or for their grammar); one more gets a 503.
    chunked_prefill_size: most tokens computed in one step beside one of each running request. It bounds the time
        between two tokens of a running request (see ``planner.py``).
    prefill_min_share: the part of chunked_prefill_size that forced runs and drafts can not take from prefill.
    max_score_rows: most prompt positions of one step whose logits are read for input logprobs; it bounds the
        memory of a logits matrix [rows, vocabulary].
    policy: order of the waiting requests: a name in ``policy.POLICIES``, or ``module:attribute``.
    policy_seed: for policies that draw lots.
    max_lag_s: the oldest request of the highest priority is the next one, whatever the policy says, once it has waited
        for so many seconds longer than half of those of its priority, and not yet for max_overtake_s.
    max_overtake_s: while the oldest request of the highest priority has waited for longer than so many seconds, at
        least every fourth admission is the oldest's, whatever the policy says (see ``lineup.py``).
    policy_window: how many waiting requests, those of the highest priority and of these the oldest, a policy
        orders and a step tries to admit. It bounds the planning time of a step when the queue is long.
    page_size: slots of a page. With more than one, slots are taken, shared and evicted in whole pages, which backends can
        read that want them.
    eviction_policy: of the radix cache.
    keep_ended_s: for so many seconds (and four steps) admission does not count on the tokens of a sequence that
        ended, if sequences are gone on with often enough (see ``Recent``); 0 switches this and the next off.
    room_for_turns: then admission also keeps room for at most so many further turns of the running sequences before it
        begins a new one (see ``Room``). More: better use of the cache; fewer: more requests at one time.
    output_share_start, output_share_floor, output_share_steps: admission expects a request to produce this
        share of what is left of its max_new_tokens; the share falls from start to floor in so many steps
        without a retraction, and rises again after one.
    overlap: plan each step while the one before it is computed (see ``flight.py``).
    retract_headroom_steps: a retraction makes room for so many further steps of the requests that stay, so
        that one shortage does not become one retraction a step.
    """

    max_total_tokens: int
    context_length: int
    max_running_requests: int = 256
    max_queued_requests: int = 4096
    chunked_prefill_size: int = 2048
    prefill_min_share: float = 0.25
    max_score_rows: int = 512
    policy: str = "lpm"
    policy_seed: int = 0
    max_lag_s: float = 0.4
    max_overtake_s: float = 10.0
    policy_window: int = 512
    page_size: int = 1
    eviction_policy: str = "lru"
    keep_ended_s: float = 0.5
    room_for_turns: float = 4.0
    output_share_start: float = 0.7
    output_share_floor: float = 0.14
    output_share_steps: int = 600
    retract_headroom_steps: int = 16
    overlap: bool = False

    def __post_init__(self) -> None:
        for name in (
            "max_total_tokens",
            "context_length",
            "max_running_requests",
            "max_queued_requests",
            "chunked_prefill_size",
            "max_score_rows",
            "policy_window",
            "page_size",
            "output_share_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.page_size > self.max_total_tokens:
            raise ValueError(
                f"page_size must be at most max_total_tokens ({self.max_total_tokens}), not {self.page_size}"
            )
        if not 0.0 < self.prefill_min_share <= 1.0:
            raise ValueError(f"prefill_min_share must be in (0, 1], not {self.prefill_min_share}")
        if not 0.0 < self.output_share_floor <= self.output_share_start <= 1.0:
            raise ValueError(
                "output shares must satisfy 0 < output_share_floor <= output_share_start <= 1, not "
                f"{self.output_share_floor} and {self.output_share_start}"
            )
        for name in (
            "max_lag_s",
            "max_overtake_s",
            "keep_ended_s",
            "room_for_turns",
            "retract_headroom_steps",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but it is {getattr(self, name)}")

    @property
    def capacity(self) -> int:
        """Slots that can be used: whole pages."""
        return self.max_total_tokens - self.max_total_tokens % self.page_size

    @property
    def prefill_min_tokens(self) -> int:
        """Prompt tokens of a step that nothing else can take."""
        return max(1, int(self.chunked_prefill_size * self.prefill_min_share))
