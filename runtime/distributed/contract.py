"""What tensor parallelism asks of a group of processes, and how the group is named. Without torch.

A group of ``size`` processes (ranks) computes one model. Each holds a part of every large matrix and the K/V of its own
heads; what they compute in parts is added up or joined by the group. Rank 0 has the scheduler and samples; see
``runtime/distributed/leader.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class GroupBroken(BaseException):
    """A rank is gone, stuck or out of step: nothing can be computed any more, in this group.

    No ``Exception``, as the scheduler takes those of a forward pass for the failure of one batch and goes on.
    """


class Ranks(Protocol):
    """The group, as the decoder sees it. All ranks call the same methods in the same order."""

    rank: int
    size: int

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over all ranks, on every rank. May overwrite its argument."""

    def join(self, part: Tensor) -> Tensor:
        """[N, width] of each rank → [N, size * width] on rank 0, in the order of the ranks; ``part`` on the others."""

    def wait_for_all(self) -> None:
        """Until every rank has come here; loading may take one of them much longer than another."""


@dataclass(frozen=True)
class Place:
    """One process's place in a group. path: where the group's files are, in a directory that only the owner may enter;
    their names begin with it. timeout: seconds that a rank waits for another within a step."""

    rank: int
    size: int
    path: str
    timeout: float

    @property
    def rendezvous(self) -> str:
        """The file through which the ranks find each other."""
        return f"{self.path}-store"


def inbox_of(path: str, rank: int) -> str:
    """The address at which a rank other than 0 is told about steps. path: of its ``Place``."""
    return f"ipc://{path}-{rank}"
