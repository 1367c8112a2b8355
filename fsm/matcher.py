"""The ``Grammar`` and ``Matcher`` over an automaton of tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from trellis.errors import ConstraintError
from trellis.fsm.automaton import DEAD, START
from trellis.fsm.contract import MaskRow, Vocabulary
from trellis.fsm.flat_trie import LongArray
from trellis.fsm.spanning import KeptSpans

T = TypeVar("T")


class TokenStates(Protocol):
    """States between tokens, shared by all matchers of a grammar; see ``TokenAutomaton`` for what they mean."""

    @property
    def nbytes(self) -> int: ...

    @property
    def states(self) -> int: ...

    @property
    def masks(self) -> int: ...

    def mask(self, state: int) -> MaskRow: ...

    def step(self, state: int, token: int) -> int: ...

    def accepting(self, state: int) -> bool: ...

    def ends(self, state: int) -> bool: ...

    def run(self, state: int, output: Sequence[int]) -> tuple[int, ...]: ...

    def draft(self, state: int, output: Sequence[int]) -> tuple[int, ...]: ...

    def begin(self, data: bytes) -> int: ...

    def spanning(self, data: bytes) -> LongArray: ...

    def joint_run(self, output: Sequence[int], data: bytes) -> tuple[int, ...]: ...


class CompressedGrammar:
    """A ``Grammar`` that ``BeginsInside``; its automaton is shared by the matchers and grows as they walk.

    make: a new automaton of the same language, for when one has used up its budget.
    accepts_bytes: the language itself, whatever the vocabulary can write.
    """

    def __init__(
        self,
        make: Callable[[], TokenStates],
        accepts_bytes: Callable[[bytes], bool],
        vocabulary: Vocabulary,
        warnings: list[str],
        engine: str = "compressed",
    ) -> None:
        self.engine = engine
        self.warnings = warnings
        self.eos_token_ids = vocabulary.eos_token_ids
        self.automaton = make()
        self._make = make
        self._accepts_bytes = accepts_bytes
        self._lock = threading.Lock()
        self._spans = KeptSpans()

    @property
    def nbytes(self) -> int:
        return self.automaton.nbytes

    def matcher(self) -> CompressedMatcher:
        return CompressedMatcher(self)

    def accepts(self, text: str | bytes) -> bool:
        try:
            data = text.encode() if isinstance(text, str) else text
        except UnicodeEncodeError:
            return False  # a lone surrogate: UTF-8 has no such text
        with self._lock:
            return self._accepts_bytes(data)

    def spanning(self, data: bytes) -> LongArray:
        return self._spans.get(data, lambda: self._ask(lambda automaton: automaton.spanning(data)))

    def joint_run(self, output: Sequence[int], data: bytes) -> tuple[int, ...]:
        return self._ask(lambda automaton: automaton.joint_run(output, data))

    def begun(self, output: Sequence[int], data: bytes, run: Sequence[int] = ()) -> CompressedMatcher | None:
        if self._ask(lambda automaton: automaton.begin(data)) == DEAD:
            return None
        return CompressedMatcher(self, output, data, run)

    def _ask(self, ask: Callable[[TokenStates], T]) -> T:
        """Ask the automaton; if its budget is used up, ask a new one once more."""
        automaton = self.automaton
        try:
            return ask(automaton)
        except ConstraintError as error:
            if error.code != "limit":
                raise
            return ask(self.renew(automaton))

    def renew(self, full: TokenStates) -> TokenStates:
        """An automaton with room instead of one whose budget is used up."""
        with self._lock:
            if self.automaton is full:
                self.automaton = self._make()
            return self.automaton


class CompressedMatcher:
    """A ``Matcher``: the state after each accepted token, and the forced run that is under way there.

    before, data, run: see ``BeginsInside.begun``.
    """

    def __init__(
        self,
        grammar: CompressedGrammar,
        before: Sequence[int] = (),
        data: bytes = b"",
        run: Sequence[int] = (),
    ) -> None:
        self._grammar = grammar
        self._automaton = grammar.automaton
        self._before = list(before)
        self._data = data
        self._tokens: list[int] = []
        self._states = [self._automaton.begin(data) if data else START]
        # What is left of the forced run at each position; None: not worked out yet.
        self._runs: list[tuple[int, ...] | None] = [tuple(run) or None]
        self._ended = False

    def fill_mask(self, row: MaskRow) -> bool:
        run = self._run()
        if self._ended:
            row.fill(0)
        elif run:
            row.fill(0)
            row.view(np.uint32)[run[0] >> 5] = 1 << (run[0] & 31)
        else:
            np.copyto(row, self._here(lambda automaton, state: automaton.mask(state)))
        return True

    def accept(self, token_id: int) -> bool:
        if self._ended:
            return False
        if token_id in self._grammar.eos_token_ids:
            if not self.is_accepting():
                return False
            self._push(token_id, self._states[-1], ())
            self._ended = True
            return True
        run = self._run()
        if run and run[0] != token_id:
            return False
        reached = self._here(lambda automaton, state: automaton.step(state, token_id))
        if reached == DEAD:
            return False
        self._push(token_id, reached, run[1:] or None)
        return True

    def forced(self) -> list[int]:
        return list(self._run())

    def draft(self) -> list[int]:
        if self._run():
            return []
        output = [*self._before, *self._tokens] if self._before else self._tokens
        return list(self._here(lambda automaton, state: automaton.draft(state, output)))

    def rollback(self, n: int) -> None:
        if not 0 <= n <= len(self._tokens):
            raise ValueError(f"cannot take back {n} tokens: {len(self._tokens)} were accepted")
        if n:
            del self._tokens[-n:], self._states[-n:], self._runs[-n:]
            self._ended = False

    def is_accepting(self) -> bool:
        return not self._ended and self._here(lambda automaton, state: automaton.accepting(state))

    def is_finished(self) -> bool:
        return self._ended or self._here(lambda automaton, state: automaton.ends(state))

    def _push(self, token: int, state: int, run: tuple[int, ...] | None) -> None:
        self._tokens.append(token)
        self._states.append(state)
        self._runs.append(run)

    def _run(self) -> tuple[int, ...]:
        run = self._runs[-1]
        if run is None:
            output = [*self._before, *self._tokens] if self._before else self._tokens
            run = self._here(lambda automaton, state: automaton.run(state, output))
            self._runs[-1] = run
        return run

    def _here(self, ask: Callable[[TokenStates, int], T]) -> T:
        """Ask the automaton about this position; if its budget is used up, ask a new one once more."""
        try:
            return ask(self._automaton, self._states[-1])
        except ConstraintError as error:
            if error.code != "limit":
                raise
            self._renew()
            return ask(self._automaton, self._states[-1])

    def _renew(self) -> None:
        self._automaton = self._grammar.renew(self._automaton)
        states = [self._automaton.begin(self._data) if self._data else START]
        for token in self._tokens:
            ends = token in self._grammar.eos_token_ids
            states.append(states[-1] if ends else self._automaton.step(states[-1], token))
        self._states = states
