"""The scheduler's numbers as one flat dictionary."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trellis.runtime.scheduler.roster import Compiler

if TYPE_CHECKING:
    from trellis.runtime.scheduler.scheduler import Scheduler


def collect(scheduler: Scheduler, grammars: Compiler) -> dict[str, Any]:
    """Totals since the start (see ``Counters``), and the state now.

    hit_rate: cached share of the prompt tokens that were needed so far. private_tokens: slots of running
    requests that are not in the tree. executor: what the runner says of itself, if it has a device. free + evictable + protected + private = pool size.
    """
    roster, memory, counters = scheduler.roster, scheduler.memory, scheduler.counters
    needed = counters.cached_tokens + counters.computed_prompt_tokens
    return {
        **asdict(counters),
        "hit_rate": counters.cached_tokens / needed if needed else 0.0,
        "running_requests": len(roster.running),
        "waiting_requests": len(roster.waiting),
        "compiling_requests": len(roster.compiling),
        "policy": scheduler.policy_name,
        "expected_output_share": scheduler.expectation.share,
        "pool_tokens": memory.size,
        "free_tokens": memory.pool.free,
        "evictable_tokens": memory.cache.evictable,
        "protected_tokens": memory.cache.protected,
        "private_tokens": sum(memory.private(request) for request in roster.running),
        "evicted_tokens": memory.evicted_tokens,
        "cache": memory.cache.stats(),
        "grammars": grammars.stats(),
        "executor": scheduler.runner_stats(),
    }
