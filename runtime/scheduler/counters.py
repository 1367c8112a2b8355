"""What the scheduler counts, from its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Totals. Tokens of the prompt are counted once a request: as cached, or as computed; what is computed
    again after a retraction is in recomputed_tokens. sampled and forced: output tokens. steps: calls that
    had something to do; forward_passes: batches computed; failed_steps: batches that failed; drifts: times
    the slot books were wrong and made anew. constraint_misses: finished texts that broke a constraint which the
    masks should have enforced. drafted, accepted drafts: tokens computed in case they come, and those that came.
    aborted: by a client; refused: never taken."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    recomputed_tokens: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0
    steps: int = 0
    forward_passes: int = 0
    failed_steps: int = 0
    retractions: int = 0
    drifts: int = 0
    constraint_misses: int = 0
