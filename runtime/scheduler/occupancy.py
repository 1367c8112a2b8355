"""Who holds how much of the pool, each token counted once: the input of the future-peak estimate."""

from __future__ import annotations

from trellis.radix import Node
from trellis.runtime.scheduler.admission import future_peak
from trellis.runtime.scheduler.request import Request


class Occupancy:
    """The tokens held by requests, now and to come, as ``future_peak`` wants them.

    Several requests may hold one tree node; it is free when the last of them ends. So it counts for the one
    that is expected to go on longest. Valid within one planning: meanwhile the tree may grow and its edges
    may be cut, but no lock of a counted request may go.

    page_size: of the memory, in which a request holds whole pages.
    """

    def __init__(self, page_size: int = 1) -> None:
        self._page_size = page_size
        self._held: list[int] = []
        self._left: list[int] = []
        self._holder: dict[Node, int] = {}
        self._taken: list[tuple[Node, int | None]] = []

    def add(self, request: Request, left: int) -> None:
        """Count a request that is expected to produce ``left`` more tokens. O(nodes of its path)."""
        index = len(self._held)
        to_prefill = max(0, request.target - len(request.slots))
        self._held.append(request.private + to_prefill)
        self._left.append(left)
        self._taken = []
        for node, holder in self._path(request):
            if holder is not None:
                if self._left[holder] >= left:
                    break  # and all ancestors have a holder that goes on at least as long
                self._held[holder] -= node.length
            self._held[index] += node.length
            self._holder[node] = index
            self._taken.append((node, holder))

    def undo(self) -> None:
        """Forget the request last added, which put nothing into the tree. Only once."""
        del self._held[-1], self._left[-1]
        for node, holder in self._taken:
            if holder is None:
                del self._holder[node]
            else:
                self._holder[node] = holder
                self._held[holder] += node.length

    def published(self, request: Request) -> None:
        """The request last added put slots into the tree that were counted as its own."""
        index = len(self._held) - 1
        for node, holder in self._path(request):
            if holder is None:
                self._holder[node] = index

    def peak(self) -> int:
        """Most slots that the requests will hold together at one time."""
        return future_peak(self._held, self._left, self._page_size)

    def _path(self, request: Request) -> list[tuple[Node, int | None]]:
        """The nodes that the request holds, deepest first, each with who it counts for so far."""
        path = () if request.node is None else request.node.ancestry()
        return [(node, self._holder_of(node)) for node in path]

    def _holder_of(self, node: Node) -> int | None:
        """An edge that was cut after it had been counted belongs, in both parts, to the same request."""
        if node not in self._holder:
            children = (node.children or {}).values()
            below = [self._holder[child] for child in children if child in self._holder]
            if below:
                self._holder[node] = max(below, key=self._left.__getitem__)
        return self._holder.get(node)
