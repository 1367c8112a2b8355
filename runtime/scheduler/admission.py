"""How much memory will be needed: the future peak of the running requests, and what output to expect.

A request holds ``held`` tokens now and grows by one token a step for ``left`` steps; then all of it is free.
The sum over all requests can only peak at the last step of one of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def future_peak(held: npt.ArrayLike, left: npt.ArrayLike, page_size: int = 1) -> int:
    """Most slots held at any time from now on by requests that all go on at one token a step, and hold whole pages.

    held, left: int64 [n], n >= 0: tokens now, and steps to go, of each request. O(n log n): with the requests
    sorted by falling ``left``, the k-th one ends when those before it are still there, each grown by
    ``left[k]``. (The estimator of LightLLM's "past-future" scheduler, Gong et al. 2025, arXiv:2507.10150.) What pages
    add is exact, too: requests that use as much of their last page are counted together, O(n page_size).
    """
    held = np.asarray(held, dtype=np.int64)
    left = np.asarray(left, dtype=np.int64)
    if not len(held):
        return 0
    falling = np.argsort(-left, kind="stable")
    held, left = held[falling], left[falling]
    if page_size > 1:
        rests = np.arange(page_size)
        counts = np.cumsum(held[:, None] % page_size == rests, axis=0)  # of those before each, by rest
        pages = np.cumsum(held // page_size) + (counts * -(-(left[:, None] + rests) // page_size)).sum(1)
        return int(pages.max()) * page_size
    return int((np.cumsum(held) + left * np.arange(1, len(left) + 1)).max())


class OutputExpectation:
    """The share of what is left of max_new_tokens that requests are expected to produce.

    It starts high, falls linearly with every step that went well, and starts anew when nothing runs. When
    memory runs out it goes back to the start, and to everything if it was there already: then what admission
    promises is kept to the token, and retractions end.
    """

    def __init__(self, start: float, floor: float, steps: int) -> None:
        self._start = start
        self._floor = floor
        self._decay = (start - floor) / steps
        self.share = start

    def expect(self, max_new_tokens: int, produced: int) -> int:
        """Output tokens still expected from a request; 0 only when it may produce no more."""
        return int(np.ceil(self.share * max(0, max_new_tokens - produced)))

    def step(self) -> None:
        self.share = max(self._floor, self.share - self._decay)

    def idle(self) -> None:
        self.share = self._start

    def shortage(self) -> None:
        """Memory ran out: expect more than now."""
        self.share = 1.0 if self.share >= self._start else self._start
