"""Every place where the loop waits for the device, by name. Nothing else in it may.

Python plans and launches ahead of the device; a wait in the wrong place makes the device wait for Python in its turn. So
each is counted under its name, and with ``torch.cuda.set_sync_debug_mode("error")`` any other read of a device tensor is an
error (there is a test that runs so on a GPU).

Copies to the device are none: they come out of pinned memory, and the stream does them in order. One more is within a
backend: before flashinfer plans a step it waits for the copy of its last plan, which is done when the step before begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trellis.runtime.cuda.device import Device

REASONS = {
    "results": "the scheduler enters what a step sampled. The wait is for an event after the copy of the ids, not for what was "
    "launched since: with overlap the next step is on the device by then",
    "reports": "log-probabilities were asked for. Their requests are never planned ahead of their results, so all that is "
    "launched is the step itself",
    "failure": "a step failed: whether the device can go on is seen only when its work is done",
    "start": "weights are loaded, memory is measured and graphs are captured, before the first request",
}


class Waits:
    """counts: how often each was waited for."""

    def __init__(self, device: Device) -> None:
        self.counts = dict.fromkeys(REASONS, 0)
        self._device = device

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """What is done within may wait for the device. KeyError for a name without a reason."""
        self.counts[name] += 1
        with self._device.waiting_allowed():
            yield
