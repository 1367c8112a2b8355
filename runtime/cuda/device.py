"""What the runtime uses of a device beside tensors, behind one interface, so that tests run all of it on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from trellis.errors import ModelLoadError

Replay = Callable[[], None]

WARM_UPS = (
    2  # the first run compiles kernels and makes workspaces, which must not happen while a graph is recorded
)


class Mark(Protocol):
    """A point in the device's work."""

    def wait(self) -> None:
        """Until the device has done all that was launched before the mark."""


class Device(Protocol):
    """One stream of work: what is launched is done in that order."""

    @property
    def name(self) -> str: ...

    @property
    def where(self) -> torch.device: ...

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] of host memory, uninitialised, that copies to and from the device without waiting. When the tensor is
        dropped, its memory is used again only after the copies that were launched with it are done."""

    def mark(self) -> Mark:
        """The point that the launches have come to."""

    def capture(self, body: Callable[[], None]) -> Replay:
        """Record what ``body`` launches. The result launches it again: the same work on the same memory, nothing of Python."""

    def total_memory(self) -> int:
        """Bytes."""

    def used_memory(self) -> int:
        """Bytes that are taken now, by whomever; what was freed is given back first."""

    def peak_of(self, work: Callable[[], None]) -> int:
        """Most bytes that ``work`` holds at one time beyond what was held before."""

    def give_back(self) -> None:
        """Hand freed memory back to the device."""

    def check(self) -> None:
        """Wait for all work; raises if the device cannot go on."""

    def waiting_allowed(self) -> AbstractContextManager[None]:
        """Within, a wait is meant. Elsewhere torch reports one as an error, if it was told to (set_sync_debug_mode)."""


class CudaDevice:
    """The current CUDA device, on its current stream.

    Pinned memory is that of torch's caching host allocator, which records an event with each copy and waits for none.
    Raises ModelLoadError where torch has no usable GPU.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ModelLoadError(
                "device cuda was chosen, but torch cannot use a GPU here (torch.cuda.is_available() is False: an old "
                "driver, or no GPU for this process); take device cpu"
            )
        self.where = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.where)
        self._graph_memory = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def mark(self) -> Mark:
        return _EventMark(torch.cuda.current_stream(self.where))

    def capture(self, body: Callable[[], None]) -> Replay:
        """All graphs share one pool of memory: they never run at the same time, and nothing of one is read after another."""
        here = torch.cuda.current_stream(self.where)
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            for _ in range(WARM_UPS):
                body()
        here.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, such as those that compile grammars, may do as they like meanwhile.
        with torch.cuda.graph(
            graph, pool=self._graph_memory, stream=self._side, capture_error_mode="thread_local"
        ):
            body()
        return graph.replay

    def total_memory(self) -> int:
        return int(torch.cuda.mem_get_info(self.where)[1])

    def used_memory(self) -> int:
        torch.cuda.synchronize(self.where)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.where)
        return int(total - free)

    def peak_of(self, work: Callable[[], None]) -> int:
        torch.cuda.synchronize(self.where)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.where)
        torch.cuda.reset_peak_memory_stats(self.where)
        work()
        torch.cuda.synchronize(self.where)
        return int(torch.cuda.max_memory_reserved(self.where) - before)

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def check(self) -> None:
        torch.cuda.synchronize(self.where)

    @contextmanager
    def waiting_allowed(self) -> Iterator[None]:
        mode = torch.cuda.get_sync_debug_mode()
        if not mode:
            yield
            return
        torch.cuda.set_sync_debug_mode(0)
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


class _EventMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()  # lets other threads have the interpreter meanwhile
