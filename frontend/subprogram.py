"""Programs that run inside another one: on its state, or each on a branch of it."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trellis.errors import InvalidRequestError, RequestAborted
from trellis.frontend.state import ProgramState
from trellis.frontend.variable import Variable

if TYPE_CHECKING:
    from trellis.frontend.async_state import AsyncProgramState
    from trellis.frontend.program import Arguments, Program

_OF_A_RUN = ("backend", "timeout", "stream")


@dataclass(frozen=True)
class Call:
    """A program with the arguments of its body, and the state that it is to write to."""

    program: Program
    state: ProgramState
    arguments: Arguments

    def __call__(self, state: ProgramState | AsyncProgramState) -> Any:
        """state: ``self.state``, or an async state around it, as the body takes it."""
        return self.program._call(self.arguments, state)


def call_on(state: ProgramState, program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """What ``state.run(program, *args, **kwargs)`` will do.

    The gens of the program take what they do not say from the call, then from its ``with_options``, then from the
    run. TypeError for what is no program, wrong arguments, and options that belong to a whole run.
    """
    from trellis.frontend.program import Program

    if not isinstance(program, Program):
        raise TypeError(
            f"s.run takes a program, which @function makes, got {program!r:.100}; call a function itself: f(s, ...)"
        )
    arguments, options = program._split(args, kwargs, program._options.over(state.options))
    for name in _OF_A_RUN:
        if getattr(options, name) != getattr(state.options, name):
            raise TypeError(
                f"program {program.name!r}: {name} belongs to a whole run, and here it runs on the state of another"
            )
    view = ProgramState(state._run, state._executor, state._inside, options)
    return Call(program, view, arguments)


def run_on(state: ProgramState, program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``state.run``."""
    call = call_on(state, program, args, kwargs)
    if program.is_async:
        raise TypeError(
            f"program {program.name!r} is an 'async def', and this one is not: it cannot be awaited here"
        )
    return call(call.state)


# -- gather ------------------------------------------------------------------------------------------------------


class Gathering:
    """Named programs, each on a branch of one state. Used from plain and from async code alike."""

    def __init__(self, state: ProgramState, programs: Mapping[str, Program], on_error: str) -> None:
        """Raises before anything starts when something is wrong."""
        if on_error not in ("raise", "return"):
            raise InvalidRequestError("gather.on_error", f"must be 'raise' or 'return', got {on_error!r}")
        if not programs:
            raise InvalidRequestError("gather", "needs at least one program: s.gather(name=program)")
        for program in programs.values():
            call_on(state, program, (), {})
        self._state = state
        self._names = list(programs)
        self._stops = on_error == "raise"
        self._before = dict(state._executor.variables)
        branches = state.fork(len(programs))
        self.calls = [call_on(each, p, (), {}) for each, p in zip(branches, programs.values(), strict=True)]
        self._results: dict[int, Any] = {}
        self._first: int | None = None  # that failed

    def ended(self, index: int, result: Any) -> None:
        """A program is done."""
        self._results[index] = result

    def failed(self, index: int, error: BaseException) -> None:
        """A program has raised, or its state has failed."""
        self.calls[index].state._executor.fail(error, by_body=True)
        if self._first is None:
            self._first = index
            if self._stops:
                self.cancel(f"{self._names[index]!r}, which it is gathered with, failed")

    def cancel(self, reason: str) -> None:
        """End those that are still at work."""
        for call in self.calls:
            call.state._executor.fail(RequestAborted(reason))

    def results(self) -> dict[str, Any]:
        """What ``state.gather`` returns, once all have ended; the variables are then in the state."""
        if self._stops and self._first is not None:
            failure = self.calls[self._first].state._executor.failure
            assert failure is not None
            raise failure.error(f"gather {self._names[self._first]!r}")
        found = {}
        for index, (name, call) in enumerate(zip(self._names, self.calls, strict=True)):
            failure = call.state._executor.failure
            found[name] = failure.error() if failure is not None else self._results.get(index)
            self._state._executor.define(self._joined(name, call.state))
        return found

    def _joined(self, name: str, branch: ProgramState) -> Variable:
        """The variables that a program set, as one: a dict in each of value, text and meta."""
        executor, joined = branch._executor, Variable(name, "join")
        if executor.failure is not None:
            joined.resolve(executor.failure.error(), None, None)
            return joined
        own = {key: v for key, v in executor.variables.items() if self._before.get(key) is not v}
        problem = next((v.problem for v in own.values() if v.problem is not None), None)
        joined.resolve(
            {key: v.problem.error() if v.problem is not None else v.value for key, v in own.items()},
            {key: v.text for key, v in own.items()},
            {key: v.meta for key, v in own.items()},
            problem if self._stops else None,
        )
        return joined


def gather_on(state: ProgramState, programs: Mapping[str, Program], on_error: str) -> dict[str, Any]:
    """``state.gather``: each body in a thread, with the caller's context variables."""
    for name, program in programs.items():
        if getattr(program, "is_async", False):
            raise TypeError(
                f"gather {name!r}: program {program.name!r} is an 'async def', and this one is not"
            )
    gathering = Gathering(state, programs, on_error)

    def work(index: int) -> None:
        call = gathering.calls[index]
        try:
            result = call(call.state)
            call.state._executor.wait_family()
        except BaseException as error:
            gathering.failed(index, error)
        else:
            gathering.ended(index, result)

    count = len(gathering.calls)
    with ThreadPoolExecutor(count, thread_name_prefix=f"trellis-{state._run.program}") as pool:
        try:
            for future in [pool.submit(contextvars.copy_context().run, work, i) for i in range(count)]:
                future.result()
        except BaseException:
            gathering.cancel("the program that gathers it was ended")
            raise
    return gathering.results()
