"""From a place in a group to a part of the model that works with the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trellis.errors import InvalidRequestError
from trellis.runtime.distributed.contract import Place, Ranks, inbox_of
from trellis.runtime.distributed.group import Group
from trellis.runtime.distributed.leader import LeadingStep
from trellis.runtime.distributed.wire import Message
from trellis.runtime.executor.model_runner import StepRunner
from trellis.runtime.manager.transport import ZmqSender

Build = Callable[[Ranks], StepRunner]


def device_of(rank: int, device: str) -> torch.device:
    """One GPU a rank, in the order in which the process sees them; the same CPU for all."""
    if device != "cuda":
        return torch.device(device)
    if rank >= torch.cuda.device_count():
        raise InvalidRequestError(
            "tp_size",
            f"rank {rank} has no GPU: each needs its own, and {torch.cuda.device_count()} are visible",
        )
    return torch.device(device, rank)


@dataclass(frozen=True)
class Lead:
    """What rank 0 has. runner: computes with all ranks. stay_in_touch: see ``LeadingStep``."""

    runner: StepRunner
    stay_in_touch: Callable[[], None]
    close: Callable[[], None]


def join_group(place: Place, device: str, build: Build) -> tuple[Group, StepRunner]:
    """Wait for the others, then load this rank's part. Raises as ``Group`` and ``build`` do."""
    group = Group(place, device_of(place.rank, device))
    try:
        return group, build(group)
    except BaseException:
        group.leave()
        raise


def lead_group(place: Place, device: str, build: Build) -> Lead:
    """``join_group``, on rank 0."""
    group, runner = join_group(place, device, build)
    outboxes: list[ZmqSender[Message]] = [
        ZmqSender(inbox_of(place.path, rank)) for rank in range(1, place.size)
    ]
    step = LeadingStep(runner.step, group, outboxes, runner.followed)
    runner.step = step

    def close() -> None:
        step.end()
        runner.release()
        group.leave()
        for outbox in outboxes:
            outbox.close()

    return Lead(runner, step.stay_in_touch, close)
