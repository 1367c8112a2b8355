"""Python's cyclic garbage collector in the scheduler process.

A full pass looks at every object that lives: two seconds for a prefix tree of a million nodes, in the middle of
serving, again for each quarter that the tree grows. It would find next to nothing: what leaves the tree is freed
by counting references (``trellis.radix``). So full passes are made when there is nothing to do, and under
lasting load only after millions of new objects, for the sake of what grammars and errors may leave behind.
"""

from __future__ import annotations

import gc

YOUNG, MIDDLE = 700, 10  # Python's own thresholds: a pass over the newest objects, one over the newer ones
FULL = 1_000  # passes over the newer objects before a full one: 7 million objects that came and stayed
WORTH_IT = 10  # passes over the newer objects since the last full one; fewer have not made much


def hold_back() -> None:
    """Call once, when everything is loaded. What exists then is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, FULL)


def catch_up() -> None:
    """Call when there is nothing to do: a full pass, if it may be worth it."""
    if gc.get_count()[2] >= WORTH_IT:
        gc.collect()
