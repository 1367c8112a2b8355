"""Forked states, side by side, and how they are joined."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

from trellis.errors import InvalidRequestError
from trellis.frontend.expressions import Appendable, as_expr
from trellis.frontend.failure import Failure
from trellis.frontend.loop import forbid_blocking
from trellis.frontend.state import ProgramState
from trellis.frontend.variable import Variable

Each = Callable[[int], Appendable]


class ProgramStateGroup(Sequence[ProgramState]):
    """The branches of one fork. ``with s.fork(3) as branches:`` joins them at its end, and cancels them if the
    block raises."""

    def __init__(
        self, parent: ProgramState, states: list[ProgramState], before: Mapping[str, Variable]
    ) -> None:
        self._parent = parent
        self._states = states
        self._before = before

    def __len__(self) -> int:
        return len(self._states)

    @overload
    def __getitem__(self, index: int) -> ProgramState: ...
    @overload
    def __getitem__(self, index: slice) -> list[ProgramState]: ...
    def __getitem__(self, index: int | slice) -> ProgramState | list[ProgramState]:
        return self._states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        # `branches[i] += expr` assigns the state back to its place.
        if self._states[index] is not state:
            raise TypeError("a branch cannot be replaced; append to it with branches[i] += ...")

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._states)

    def __iadd__(self, what: Appendable | Each) -> ProgramStateGroup:
        """Append to every branch: a string or expression to all of them, a list element by element, or a
        function of the branch's index."""
        count = len(self._states)
        if isinstance(what, (list, tuple)):
            if len(what) != count:
                raise InvalidRequestError("branches +=", f"a list of {len(what)} for {count} branches")
            exprs = [as_expr(item) for item in what]
        elif callable(what):
            exprs = [as_expr(what(index)) for index in range(count)]
        else:
            exprs = [as_expr(what)] * count
        for state, expr in zip(self._states, exprs, strict=True):
            state += expr
        return self

    def join(self, mode: str = "gather", on_error: str = "raise") -> ProgramState:
        """Wait for the branches and bring them into the parent, which is returned.

        mode: ``gather`` makes each variable that a branch set after the fork a list in the parent, one entry a
            branch, in their order; None stands where a branch did not set it. ``concatenate`` appends the
            text that each branch added, in their order.
        on_error: ``raise`` raises ProgramError as soon as a branch fails; for a branch whose text was cut before
            it was a value of its schema, when the joined value is read. ``return`` puts the branch's error in its
            place in the lists (with ``concatenate`` a failed branch adds nothing).
        """
        if mode not in ("gather", "concatenate"):
            raise InvalidRequestError("join.mode", f"must be 'gather' or 'concatenate', got {mode!r}")
        if on_error not in ("raise", "return"):
            raise InvalidRequestError("join.on_error", f"must be 'raise' or 'return', got {on_error!r}")
        self._wait(stop_at_failure=on_error == "raise")
        self._parent._raise_failure()
        if on_error == "raise":
            for index, failure in enumerate(self._failures()):
                if failure is not None:
                    raise failure.error(f"branch {index}")
        if mode == "gather":
            self._gather(on_error)
        else:
            self._concatenate()
        return self._parent

    def cancel(self, reason: str = "cancelled by the program") -> None:
        """End every branch that is still at work."""
        for state in self._states:
            state.cancel(reason)

    def __enter__(self) -> ProgramStateGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.join()
        else:
            self.cancel("the with block of its fork was left by an error")

    def __repr__(self) -> str:
        return f"<ProgramStateGroup of {len(self._states)} branches of {self._parent!r}>"

    def _failures(self) -> list[Failure | None]:
        return [state._executor.failure for state in self._states]

    def _wait(self, stop_at_failure: bool) -> None:
        """Block until every branch is idle, or until the first has failed."""
        gate = threading.Lock()
        gate.acquire()
        self._watch(gate.release, stop_at_failure)
        if not gate.acquire(blocking=False):
            forbid_blocking()
            gate.acquire()

    def _watch(self, opens: Callable[[], None], stop_at_failure: bool) -> None:
        """Call ``opens`` once, from any thread, when every branch is idle or, if wanted, the first has failed."""
        latch = _Latch(opens, len(self._states), stop_at_failure)
        for state in self._states:
            latch.watch(state)

    def _gather(self, on_error: str) -> None:
        names: dict[str, None] = {}
        for state in self._states:
            for name, variable in state._executor.variables.items():
                if self._before.get(name) is not variable:
                    names[name] = None
        for name in names:
            entries = [self._entry(state, name) for state in self._states]
            values = [e.problem.error() if e.problem else e.value for e in entries]
            problem = next((e.problem for e in entries if e.problem), None) if on_error == "raise" else None
            joined = Variable(name, "join")
            joined.resolve(values, [e.text for e in entries], [e.meta for e in entries], problem)
            self._parent._executor.define(joined)

    def _entry(self, state: ProgramState, name: str) -> Variable:
        """A variable in one branch, or what stands for it there."""
        failure = state._executor.failure
        variable = state._executor.variables.get(name)
        if failure is not None or variable is None or variable is self._before.get(name):
            return Variable(name, "join", text=None, problem=failure)
        return variable

    def _concatenate(self) -> None:
        for state in self._states:
            if state._executor.failure is None:
                self._parent._executor.splice(state._executor)


class _Latch:
    """Calls ``opens`` once all states are idle, or one has failed. Each state is looked at only when it changes."""

    def __init__(self, opens: Callable[[], None], count: int, stop_at_failure: bool) -> None:
        self._opens = opens
        self._left = count
        self._stop_at_failure = stop_at_failure
        self._lock = threading.Lock()
        self._open = False

    def watch(self, state: ProgramState) -> None:
        executor = state._executor
        if executor.feed.notify(lambda: executor.idle, lambda: self.watch(state)):
            self._arrived(failed=executor.failure is not None)

    def _arrived(self, failed: bool) -> None:
        with self._lock:
            self._left -= 1
            if not self._open and (self._left == 0 or (failed and self._stop_at_failure)):
                self._open = True
                self._opens()


def fork(state: ProgramState, n: int = 1) -> ProgramStateGroup:
    """``state.fork(n)``."""
    return state.fork(n)


def join(branches: ProgramStateGroup, mode: str = "gather", on_error: str = "raise") -> ProgramState:
    """``branches.join(mode, on_error)``."""
    return branches.join(mode, on_error)
