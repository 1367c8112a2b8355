"""The ranks of a group, joined by ``torch.distributed``: gloo on CPUs, NCCL on GPUs.

All ranks are processes of one machine. They find each other through a file in the server's private directory, and talk over
the loopback interface, so that nobody outside can reach them; where the user has set an interface, that one stays.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trellis.errors import BackendError
from trellis.runtime.distributed.contract import Place
from trellis.runtime.executor.contract import Extend

JOIN_TIMEOUT = 600.0  # seconds until all processes have started, and until all have loaded their part
LOOPBACK = "lo"


class Group:
    """Implements ``Ranks``. One of them in a process. device: where the tensors are that it is given.

    Raises BackendError when the others do not come, or the process is in a group already. Its methods raise whatever
    torch.distributed raises when a rank is gone, or does not come within the place's timeout.
    """

    def __init__(self, place: Place, device: torch.device) -> None:
        if dist.is_initialized():
            raise BackendError(
                "this process is in a group of torch.distributed already; a rank needs its own", 500
            )
        self.rank, self.size = place.rank, place.size
        self.device = device
        self._meetings = 0
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, LOOPBACK)
        if not Path(place.rendezvous).parent.is_dir():  # where it is not, a FileStore waits for it
            raise BackendError("the server's private directory is gone, so this rank can meet nobody", 500)
        self._store = dist.FileStore(place.rendezvous, place.size)  # type: ignore[attr-defined]
        self.wait_for_all()
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", self._store),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=place.timeout),
            device_id=device if device.type == "cuda" else None,
        )
        self._joined = True

    def sum(self, partial: Tensor) -> Tensor:
        dist.all_reduce(partial)
        return partial

    def join(self, part: Tensor) -> Tensor:
        if self.rank > 0:
            dist.gather(part, None, dst=0)
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.gather(part, parts, dst=0)
        return torch.cat(parts, dim=-1)

    def share_followed(self, tokens: Tensor | None, extends: Sequence[Extend]) -> None:
        """Give the others what rank 0 sampled and these extends follow. tokens: int64 [places], overwritten on the others. On a
        GPU this is launched between the step that sampled and the one that follows, and nobody waits for it."""
        count = max(extend.follows for extend in extends) + 1
        if count and tokens is not None:
            dist.broadcast(tokens[:count], src=0)

    def meet(self) -> None:
        """Return when every rank has called this; within the timeout, unlike ``wait_for_all``."""
        here = torch.ones(1, device=self.device)
        if int(self.sum(here)) != self.size:
            raise BackendError(f"{int(here)} ranks of {self.size} have come", 500)

    def wait_for_all(self) -> None:
        """Through the store: it waits longer than a collective may."""
        self._meetings += 1
        keys = [f"meeting-{self._meetings}-{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], "here")
        try:
            self._store.wait(keys, timedelta(seconds=JOIN_TIMEOUT))
        except RuntimeError as error:
            raise BackendError(
                f"not all {self.size} ranks came within {JOIN_TIMEOUT:.0f} s: {error}", 500
            ) from error

    def leave(self) -> None:
        """Give back sockets and threads; harmless where the others are gone. Idempotent."""
        if self._joined:
            self._joined = False
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
