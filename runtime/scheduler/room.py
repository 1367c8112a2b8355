"""Is there room for one more request? What admission asks of the memory, within one step.

A request fits when, in the pool, there is place at the same time for

- the future peak of the running requests and of this one (``Occupancy``),
- what is in the cache for requests before it that did not fit: they come as soon as they can,
- where calls are gone on with (``Recent``): the sequences that ended a moment ago; and, unless the request goes on with
  one that ended, room for all these sequences to grow by the turns that are to be expected, at most
  ``room_for_turns``, each as long as their last one.
  Without it programs are begun whose next calls do not fit any more, and which then evict each other's past.
"""

from __future__ import annotations

from collections.abc import Sequence

from trellis.radix import Node
from trellis.runtime.scheduler.admission import OutputExpectation
from trellis.runtime.scheduler.memory import KVMemory
from trellis.runtime.scheduler.occupancy import Occupancy
from trellis.runtime.scheduler.request import Request


class Room:
    """Made for one step: the running requests hold their part, then ``add`` a candidate and ask whether it ``fits``.

    O(running) to make, O(running log running) for each candidate.
    """

    def __init__(
        self, memory: KVMemory, expectation: OutputExpectation, turns: float, running: Sequence[Request]
    ) -> None:
        self._memory = memory
        self._expectation = expectation
        self._turns = turns
        self._occupancy = Occupancy(memory.page_size)
        self._growth = 0
        self._last = 0
        self._blocked: list[Node] = []
        # Those that go on longest first: then every node is counted only once.
        for request in sorted(running, key=self._expected, reverse=True):
            self.add(request)

    def add(self, request: Request) -> None:
        """Count a request that holds what the cache has for it."""
        left = self._expected(request)
        self._occupancy.add(request, left)
        self._last = left + max(0, request.prompt_len - (request.cached_tokens or request.computed))
        self._growth += self._last

    def fits(self, now: float, in_turn: bool, goes_on: bool) -> bool:
        """Does the request last added fit? in_turn: it has waited too long for anything but the peak to count.
        goes_on: with a sequence that ended, so that nothing new is begun."""
        recent = self._memory.recent
        need = self._occupancy.peak()
        if in_turn:
            return need <= self._memory.size
        need += recent.held(now, self._blocked)
        if not goes_on:
            need += int(min(self._turns, recent.turns_to_come) * self._growth)
        return need <= self._memory.size

    def undo(self) -> None:
        """The request last added is not admitted."""
        self._occupancy.undo()
        self._growth -= self._last

    def published(self, request: Request) -> None:
        """The request last added put slots into the tree."""
        self._occupancy.published(request)

    def block(self, node: Node | None) -> None:
        """A request that found the cache filled up to this node did not fit."""
        if node is not None:
            self._blocked.append(node)

    def _expected(self, request: Request) -> int:
        return self._expectation.expect(request.max_new_tokens, request.n_output)
