"""What the token level needs of a byte automaton. States are numbers; 0 is dead, 1 the start."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from trellis.fsm.flat_trie import LongArray

DEAD = 0
START = 1


class ByteAutomaton(Protocol):
    """Deterministic, and trimmed: every state but 0 can still reach acceptance.

    Methods may build what they need, so an automaton is not thread-safe: its owner locks. They raise
    ConstraintError when a budget is used up.
    """

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int:
        """States made so far, the dead one among them."""

    def accepting(self, state: int) -> bool: ...

    def ends(self, state: int) -> bool:
        """Is there no byte that leads on?"""

    def live_bytes(self, state: int) -> list[int]:
        """The bytes that lead on, in order."""

    def only_byte(self, state: int) -> int:
        """The byte that has no alternative here: no other leads on and the text may not end; or -1."""

    def inside_character(self, state: int) -> bool:
        """Are some, but not all, bytes of a character read?"""

    def step(self, state: int, data: bytes) -> int:
        """State after the bytes; 0 if they are not allowed."""

    def labels(self, data: npt.NDArray[np.uint8]) -> LongArray:
        """What ``advance`` wants to know of each byte."""

    def advance(self, states: LongArray, labels: LongArray) -> LongArray:
        """State after one byte, elementwise. states: int64, 0 stays 0."""

    def within(self, state: int, horizon: int) -> int:
        """A state that behaves the same for the next ``horizon`` bytes; where possible one for many."""

    def signature(self, state: int) -> bytes:
        """States with equal signatures have the same token mask."""


def chain(automaton: ByteAutomaton, state: int, limit: int) -> tuple[bytes, int]:
    """The compressed edge out of a state: bytes that have no alternative, and the state they lead to.

    It stops at the first state that accepts or branches, or after ``limit`` bytes.
    """
    out = bytearray()
    while len(out) < limit and (byte := automaton.only_byte(state)) >= 0:
        out.append(byte)
        state = automaton.step(state, bytes([byte]))
    return bytes(out), state
