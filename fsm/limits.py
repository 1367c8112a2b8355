"""Budgets that hold inside the construction of an automaton, not only before it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trellis.errors import ConstraintError, RequestAborted

_TICKS_PER_CLOCK = 64
_POSITION_BYTES = 300  # a continuation and its entries in dictionaries


@dataclass(frozen=True)
class Limits:
    """What one constraint may cost. Every field is a setting; the defaults suit a shared server.

    pattern_bytes, nesting, repeat: of the regex text: its UTF-8 length, depth of groups, largest bound.
    positions: places in the pattern (with their counters) that the automaton distinguishes.
    states: byte-level states alive at once. memory_bytes: tables of one grammar, without its masks.
    choices, choices_bytes: number of options and their UTF-8 bytes together.
    mask_cache_bytes: masks kept with one grammar. forced_bytes: longest forced run looked at in one go.
    schema_bytes, schema_depth, subschemas, properties: of a JSON schema: its UTF-8 length, how deep it is
        nested, how many schemas are inside it, most properties of one object.
    grammar_bytes: UTF-8 length of a grammar's text.
    compile_s, mask_s: CPU seconds for building a grammar, and for one mask or step of it.
    stop: set by whoever waited for the grammar and no longer does; no setting.
    """

    pattern_bytes: int = 8 * 1024
    nesting: int = 64
    repeat: int = 10_000
    positions: int = 100_000
    states: int = 100_000
    memory_bytes: int = 128 << 20
    choices: int = 10_000
    choices_bytes: int = 1 << 20
    mask_cache_bytes: int = 32 << 20
    forced_bytes: int = 1024
    schema_bytes: int = 256 * 1024
    schema_depth: int = 64
    subschemas: int = 20_000
    properties: int = 3_000
    grammar_bytes: int = 64 * 1024
    compile_s: float = 5.0
    mask_s: float = 2.0
    stop: threading.Event | None = field(default=None, compare=False, repr=False)

    def check_wanted(self) -> None:
        """Raises RequestAborted if nobody waits any longer for what is being made."""
        if self.stop is not None and self.stop.is_set():
            raise RequestAborted("nobody waits for this constraint any longer")


class Budget:
    """Counts what a construction uses and ends it with a ``ConstraintError`` when that is too much.

    The deadline is CPU time of the calling thread, so a busy machine refuses nothing.
    """

    def __init__(self, kind: str, limits: Limits, clock: Callable[[], float] = time.thread_time) -> None:
        self.kind = kind
        self.limits = limits
        self.positions = 0
        self.states = 0
        self.memory = 0
        self._clock = clock
        self._deadline = float("inf")
        self._seconds = 0.0
        self._ticks = 0

    def start(self, seconds: float) -> None:
        """The work that begins now may take this long."""
        self._seconds = seconds
        self._deadline = self._clock() + seconds

    def tick(self) -> None:
        """Called in every inner loop; looks at the clock now and then."""
        self._ticks += 1
        if self._ticks % _TICKS_PER_CLOCK == 0:
            self.check()

    def check(self) -> None:
        """Raises ConstraintError ``timeout`` if the time is up, RequestAborted if nobody waits any longer."""
        self.limits.check_wanted()
        if self._clock() > self._deadline:
            raise ConstraintError(
                self.kind, "timeout", "", f"needs more than {self._seconds:g} s of CPU time; simplify it"
            )

    def position(self) -> None:
        self.positions += 1
        self.memory += _POSITION_BYTES
        if self.positions > self.limits.positions:
            self._refuse("positions", self.limits.positions)
        self.tick()

    def state(self, nbytes: int) -> None:
        self.states += 1
        self.memory += nbytes
        if self.states > self.limits.states:
            self._refuse("states", self.limits.states)
        if self.memory > self.limits.memory_bytes:
            self._refuse("bytes of tables", self.limits.memory_bytes)
        self.tick()

    def _refuse(self, what: str, limit: int) -> None:
        raise ConstraintError(
            self.kind, "limit", "", f"the automaton needs more than {limit} {what}; simplify it"
        )
