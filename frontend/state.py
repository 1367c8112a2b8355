"""The state of a running program: what it has said, and its variables."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, overload

from trellis.errors import InvalidRequestError, ProgramError, RequestAborted
from trellis.frontend.executor import Executor
from trellis.frontend.expressions import Appendable, RoleBegin, RoleEnd, as_expr
from trellis.frontend.expressions import role as role_expr
from trellis.frontend.report import Report
from trellis.frontend.run import Run
from trellis.frontend.variable import Variable

if TYPE_CHECKING:
    from trellis.frontend.group import ProgramStateGroup


class ProgramState:
    """Appending (``s += gen("x")``) returns at once; reading (``s["x"]``, ``s.text()``) waits for what it needs.

    After a failure (of the backend, of the program's body, by timeout or ``cancel``) every read, iterator and append
    raises ProgramError, whose ``__cause__`` is the real error. Nothing waits on a state that has ended;
    ``partial_text`` and ``report`` show what it had done.

    In the program's body, to wait means to wait for what was appended so far. The state that ``run(stream=True)``
    returns is read while the body may still append, so there it means to wait for the program's end.
    """

    def __init__(self, run: Run, executor: Executor, inside: bool) -> None:
        self._run = run
        self._executor = executor
        self._inside = inside

    @property
    def return_value(self) -> Any:
        """What the program's body returned; does not wait."""
        return self._run.return_value

    # -- appending ---------------------------------------------------------------------------------------------

    def __iadd__(self, expr: Appendable) -> ProgramState:
        self._executor.submit(list(as_expr(expr).leaves()))
        return self

    def __add__(self, _other: Appendable) -> NoReturn:
        raise TypeError("a state is not added to: append with s += ...")

    __radd__ = __add__

    def role(self, name: str, expr: Appendable | None = None) -> AbstractContextManager[ProgramState]:
        """A message of any role: ``s.role("user", "Hi")``, or ``with s.role("user"): ...``."""
        if expr is not None:
            self.__iadd__(role_expr(name, expr))
            return contextlib.nullcontext(self)
        return self._open_role(name)

    def system(self, expr: Appendable | None = None) -> AbstractContextManager[ProgramState]:
        """``s.system("Be brief.")``, or ``with s.system(): ...``."""
        return self.role("system", expr)

    def user(self, expr: Appendable | None = None) -> AbstractContextManager[ProgramState]:
        """``s.user("Hi")``, or ``with s.user(): ...``."""
        return self.role("user", expr)

    def assistant(self, expr: Appendable | None = None) -> AbstractContextManager[ProgramState]:
        """``s.assistant(gen("x"))``, or ``with s.assistant(): ...``."""
        return self.role("assistant", expr)

    @contextlib.contextmanager
    def _open_role(self, name: str) -> Iterator[ProgramState]:
        self._executor.submit([RoleBegin(name)])
        try:
            yield self
        except BaseException:
            # The role ends even so: a program that catches this goes on with a well-formed conversation.
            with contextlib.suppress(ProgramError):
                self._executor.submit([RoleEnd(name)])
            raise
        self._executor.submit([RoleEnd(name)])

    def set(self, name: str, value: Any) -> None:
        """Set a variable from Python; it adds no text."""
        if not isinstance(name, str) or not name:
            raise InvalidRequestError("name", f"must be a non-empty string, got {name!r}")
        variable = Variable(name, "set")
        variable.resolve(value, value if isinstance(value, str) else str(value), None)
        self._executor.define(variable)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set(name, value)

    # -- reading -----------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """The value of a variable; waits for it. KeyError if the program never sets it, ProgramError if its text
        was cut before it was a value of its schema (``text`` has it even so)."""
        variable = self._finished(name)
        if variable.problem is not None:
            raise variable.problem.error()
        return variable.value

    def __contains__(self, name: str) -> bool:
        """Whether the variable is set or on its way; does not wait."""
        return name in self._executor.variables

    def variables(self) -> list[str]:
        """Names of all variables, in the order in which they were first appended; does not wait."""
        return list(self._executor.variables)

    @overload
    def text(self) -> str: ...
    @overload
    def text(self, name: str) -> Any: ...
    def text(self, name: str | None = None) -> Any:
        """The whole text so far, or the text of one variable (a list for a joined one); waits for it."""
        if name is not None:
            return self._finished(name).text
        self._executor.wait(self._inside)
        return self._executor.transcript.text()

    def meta(self, name: str) -> Any:
        """``Meta`` of a gen, ``SelectMeta`` of a select, a list of them for a joined variable, None for one that
        Python set; waits for it."""
        return self._finished(name).meta

    def messages(self) -> list[dict[str, str]]:
        """``[{"role": ..., "content": ...}]`` of the roles that have ended; waits for what was appended."""
        self._executor.wait(self._inside)
        return self._executor.transcript.as_messages()

    def sync(self) -> None:
        """Wait until all that was appended has run."""
        self._executor.wait(self._inside)

    def error(self) -> ProgramError | None:
        """Wait for what was appended, and return the error instead of raising it. None if all is well."""
        with contextlib.suppress(ProgramError):
            self._executor.wait(self._inside)
        failure = self._executor.failure
        return failure.error() if failure else None

    def partial_text(self) -> str:
        """The text so far, of a state that runs, has ended or has failed; neither waits nor raises."""
        return self._executor.feed.text

    def report(self) -> Report:
        """Each variable's tokens and time, as a table: ``print(state.report())``. Waits, but never raises."""
        error = self.error()
        return Report.of(self._run.program, list(self._executor.records), error)

    # -- streaming ---------------------------------------------------------------------------------------------

    def text_iter(self, var: str | None = None) -> Iterator[str]:
        """The whole text, or one variable's, piece by piece as it comes (``run(stream=True)``).

        The pieces add up to the final text. ProgramError if the program fails; KeyError for a variable that it
        never sets.
        """
        executor = self._executor
        self._run.loop.forbid_blocking()
        if var is None:
            yield from executor.feed.read(lambda: executor.ended(self._inside))
        else:
            variable = self._awaited(var)
            yield from variable.feed.read(lambda: variable.done or executor.failure is not None)
        self._raise_failure()

    async def text_async_iter(self, var: str | None = None) -> AsyncIterator[str]:
        """``text_iter`` for a coroutine, in any event loop."""
        executor = self._executor
        if var is None:
            async for piece in executor.feed.read_async(lambda: executor.ended(self._inside)):
                yield piece
        else:
            await executor.feed.wait_async(lambda: executor.known(var, self._inside))
            variable = self._lookup(var)
            async for piece in variable.feed.read_async(
                lambda: variable.done or executor.failure is not None
            ):
                yield piece
        self._raise_failure()

    # -- forking and ending ------------------------------------------------------------------------------------

    def fork(self, n: int = 1) -> ProgramStateGroup:
        """n states that go on from here, each on its own; does not wait. Their requests share the prefix that
        was said so far. ``join`` brings them together."""
        from trellis.frontend.group import ProgramStateGroup

        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InvalidRequestError("fork.n", f"must be an integer of at least 1, got {n!r}")
        before = dict(self._executor.variables)
        children = [ProgramState(self._run, child, self._inside) for child in self._executor.fork(n)]
        return ProgramStateGroup(self, children, before)

    def copy(self) -> ProgramState:
        """One state that goes on from here on its own."""
        return self.fork(1)[0]

    def cancel(self, reason: str = "cancelled by the program") -> None:
        """End this state and its forks: their requests are aborted, and whoever waits gets ProgramError from
        RequestAborted. Nothing happens to a state whose program has already ended."""
        if not (self._run.body_done and all(executor.idle for executor in self._executor.family())):
            self._executor.fail(RequestAborted(reason))

    def __enter__(self) -> ProgramState:
        return self

    def __exit__(self, *_: object) -> None:
        """Leaving a ``with program.run(stream=True) as s:`` cancels what is unfinished."""
        self.cancel("its with block was left")

    def __repr__(self) -> str:
        executor = self._executor
        running = not executor.idle or not self._run.body_done
        status = "failed" if executor.failure else "running" if running else "done"
        names = ", ".join(self.variables()) or "none"
        return f"<ProgramState of {self._run.program!r}: {status}, variables: {names}>"

    def _awaited(self, name: str) -> Variable:
        self._run.loop.forbid_blocking()
        self._executor.feed.wait(lambda: self._executor.known(name, self._inside))
        return self._lookup(name)

    def _lookup(self, name: str) -> Variable:
        self._raise_failure()
        variable = self._executor.variables.get(name)
        if variable is None:
            known = ", ".join(self.variables()) or "none"
            in_branch = any(name in child.variables for child in self._executor.children())
            hint = "; a branch has it: call join() first" if in_branch else ""
            raise KeyError(f"program {self._run.program!r} has no variable {name!r}; it has: {known}{hint}")
        return variable

    def _finished(self, name: str) -> Variable:
        variable, executor = self._awaited(name), self._executor
        variable.feed.wait(lambda: variable.done or executor.failure is not None)
        self._raise_failure()
        return variable

    def _raise_failure(self) -> None:
        if self._executor.failure is not None:
            raise self._executor.failure.error()
