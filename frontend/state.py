"""The state of a running program: what it has said, and its variables."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

from trellis.errors import InvalidRequestError, ProgramError, RequestAborted
from trellis.frontend.executor import Executor
from trellis.frontend.expressions import (
    Appendable,
    Expr,
    Gen,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    as_expr,
)
from trellis.frontend.expressions import role as role_expr
from trellis.frontend.parameters import RunOptions
from trellis.frontend.price import Price
from trellis.frontend.report import Report
from trellis.frontend.run import Run
from trellis.frontend.values import checked
from trellis.frontend.variable import Variable, feed_of

if TYPE_CHECKING:
    from trellis.frontend.group import ProgramStateGroup
    from trellis.frontend.program import Program
    from trellis.frontend.timelines import Timeline

T = TypeVar("T")


class ProgramState:
    """Appending (``s += gen("x")``) returns at once; reading (``s["x"]``, ``s.text()``) waits for what it needs.

    After a failure (of the backend, of the program's body, by timeout or ``cancel``) every read, iterator and append
    raises ProgramError, whose ``__cause__`` is the real error. Nothing waits on a state that has ended;
    ``partial_text`` and ``report`` show what it had done.

    In the program's body, to wait means to wait for what was appended so far. The state that ``run(stream=True)``
    returns is read while the body may still append, so there it means to wait for the program's end.
    """

    def __init__(self, run: Run, executor: Executor, inside: bool, options: RunOptions | None = None) -> None:
        self._run = run
        self._executor = executor
        self._inside = inside
        self._options = options

    @property
    def options(self) -> RunOptions:
        """What its gens inherit: the run's, or those of the program that runs on this state."""
        return self._options or self._run.options

    @property
    def return_value(self) -> Any:
        """What the program's body returned; does not wait."""
        return self._run.return_value

    # -- appending ---------------------------------------------------------------------------------------------

    def __iadd__(self, expr: Appendable) -> ProgramState:
        self._executor.submit(list(as_expr(expr).leaves()), self._options)
        return self

    def __add__(self, _other: Appendable) -> NoReturn:
        raise TypeError("a state is not added to: append with s += ...")

    __radd__ = __add__
    __iter__ = None  # without it, Python would go through s[0], s[1] and so on

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

    @contextlib.contextmanager
    def var_scope(self, name: str) -> Iterator[ProgramState]:
        """``with s.var_scope("sheet"): ...``: all text that is appended inside becomes the variable ``sheet``."""
        _check_name(name)
        self._executor.submit([ScopeBegin(name)])
        try:
            yield self
        except BaseException:
            with contextlib.suppress(ProgramError):
                self._executor.submit([ScopeEnd(name)])
            raise
        self._executor.submit([ScopeEnd(name)])

    def run(self, program: Program, *args: Any, **kwargs: Any) -> Any:
        """Run another program on this state: ``s.run(rate, topic, temperature=0)``. Returns what its body returns.

        What it appends is appended here and its variables are set here. args, kwargs: the program's own arguments;
        sampling options in kwargs are for its gens only. Exceptions of its body come out unchanged.
        """
        from trellis.frontend.subprogram import run_on

        return run_on(self, program, args, kwargs)

    def gather(self, on_error: str = "raise", **programs: Program) -> dict[str, Any]:
        """Run programs side by side, each on a fork of this state: ``s.gather(pro=argue.bind(side="for"), con=...)``.

        Waits for all of them and returns what their bodies return, by name. Their variables are then here as dicts:
        ``s["pro"]["reason"]``; ``text`` and ``meta`` likewise. Their text is not.
        on_error: ``raise`` raises ProgramError as soon as one fails, and ends the others. ``return`` puts the error in
            its place, in what is returned and in ``s[name]``.
        """
        from trellis.frontend.subprogram import gather_on

        return gather_on(self, programs, on_error)

    def set(self, name: str, value: Any) -> None:
        """Set a variable from Python; it adds no text. ``set_var`` is the same."""
        _check_name(name)
        if isinstance(value, Expr):
            raise TypeError(
                f"a variable is set to a value, not to an expression; append it: s += gen({name!r}, ...)"
            )
        variable = Variable(name, "set")
        variable.resolve(value, value if isinstance(value, str) else str(value), None)
        self._executor.define(variable)

    set_var = set

    def __setitem__(self, name: str, value: Any) -> None:
        self.set(name, value)

    # -- reading -----------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, name: Gen[T]) -> T: ...
    @overload
    def __getitem__(self, name: Select) -> str: ...
    @overload
    def __getitem__(self, name: str) -> Any: ...
    def __getitem__(self, name: str | Gen[Any] | Select) -> Any:
        """The value of a variable, by its name or by the ``gen(...)`` or ``select(...)`` itself that was appended to
        this state, which a type checker knows the type of; waits for it. KeyError if the program never sets it,
        ProgramError if its text was cut before it was a value of its schema (``text`` has it even so)."""
        variable = self._finished(name)
        if variable.problem is not None:
            raise variable.problem.error()
        return variable.value

    @overload
    def get(self, name: Gen[T]) -> T: ...
    @overload
    def get(self, name: Select) -> str: ...
    @overload
    def get(self, name: str, type: type[T]) -> T: ...
    @overload
    def get(self, name: str) -> Any: ...
    def get(self, name: str | Gen[Any] | Select, type: Any = Any) -> Any:
        """``state["x"]``, for a type checker as well: ``state.get("x", Person)`` is a Person. TypeError if it is not."""
        value = self[name]
        return value if type is Any else checked(value, type, str(name))

    get_var = get

    def __contains__(self, name: str | Gen[Any] | Select) -> bool:
        """Whether the variable is set or on its way; does not wait."""
        return self._executor.variable_of(name) is not None

    def variables(self) -> list[str]:
        """Names of all variables, in the order in which they were first appended; does not wait."""
        return list(self._executor.variables)

    @overload
    def text(self) -> str: ...
    @overload
    def text(self, name: str | Gen[Any] | Select) -> Any: ...
    def text(self, name: str | Gen[Any] | Select | None = None) -> Any:
        """The whole text so far, or the text of one variable (a list for a joined one, and for a gen with several
        samples); waits for it."""
        if name is not None:
            return self._finished(name).text
        self._executor.wait(self._inside)
        return self._executor.transcript.text()

    def meta(self, name: str | Gen[Any] | Select) -> Any:
        """``Meta`` of a gen, ``SelectMeta`` of a select, a list of them for a joined variable and for a gen with several
        samples, None for one that Python set or that is a scope; waits for it."""
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

    def report(self, price: Price | None = None) -> Report:
        """Each variable's tokens, time and cost, as a table: ``print(state.report())``; of the state's branches, too.
        Waits, but never raises.

        price: of the tokens; the backend's own (``backend.price``) if not given, and no costs without either.
        """
        error = self.error()
        paid = price if price is not None else self._run.backend.price
        records, lane = list(self._executor.records), self._executor.lane
        branches = [
            span for span in list(self._run.spans) if span.lane != lane and span.lane[: len(lane)] == lane
        ]
        return Report.of(self._run.program, records, branches, error, paid)

    def timeline(self) -> Timeline:
        """When each gen and select, of all branches, was appended, sent, answered and done; does not wait.
        ``state.timeline().save("run.html")``; ``timeline(states)`` shows several runs."""
        from trellis.frontend.timelines import timeline

        return timeline(self)

    # -- streaming ---------------------------------------------------------------------------------------------

    def text_iter(self, var: str | Gen[Any] | Select | None = None, sample: int = 0) -> Iterator[str]:
        """The whole text, or one variable's, piece by piece as it comes (``run(stream=True)``).

        The pieces add up to the final text. sample: which one, of a gen with several; the first is the one that the
        whole text goes on with. ProgramError if the program fails; KeyError for a variable that it never sets.
        """
        executor = self._executor
        if var is None:
            yield from executor.feed.read(lambda: executor.ended(self._inside))
        else:
            variable = self._awaited(var)
            feed = feed_of(variable, sample)
            yield from feed.read(lambda: variable.done or executor.failure is not None)
        self._raise_failure()

    async def text_async_iter(
        self, var: str | Gen[Any] | Select | None = None, sample: int = 0
    ) -> AsyncIterator[str]:
        """``text_iter`` for a coroutine, in any event loop."""
        executor = self._executor
        if var is None:
            async for piece in executor.feed.read_async(lambda: executor.ended(self._inside)):
                yield piece
        else:
            await executor.feed.wait_async(lambda: executor.known(var, self._inside))
            feed = feed_of(variable := self._lookup(var), sample)
            async for piece in feed.read_async(lambda: variable.done or executor.failure is not None):
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
        children = [
            ProgramState(self._run, child, self._inside, self._options) for child in self._executor.fork(n)
        ]
        return ProgramStateGroup(self, children, before)

    def copy(self) -> ProgramState:
        """One state that goes on from here on its own."""
        return self.fork(1)[0]

    def cancel(self, reason: str = "cancelled by the program") -> None:
        """End this state and its forks: their requests are aborted, and whoever waits gets ProgramError from
        RequestAborted. Nothing happens to a state whose program has already ended."""
        self._run.end(self._executor, RequestAborted(reason))

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

    def _repr_html_(self) -> str:
        """For notebooks: the text so far, with its roles and what the model wrote marked. Neither waits nor raises."""
        from trellis.frontend.display import state_html

        return state_html(self)

    def _awaited(self, name: str | Gen[Any] | Select) -> Variable:
        self._executor.feed.wait(lambda: self._executor.known(name, self._inside))
        return self._lookup(name)

    def _lookup(self, name: str | Gen[Any] | Select) -> Variable:
        self._raise_failure()
        variable = self._executor.variable_of(name)
        if variable is not None and variable.is_open and self._inside:
            raise RuntimeError(
                f"program {self._run.program!r}: {variable.name!r} is read inside its own var_scope, which has no end "
                "yet; read it after the with block"
            )
        if variable is None and not isinstance(name, str):
            reason = f"was not appended to this state of program {self._run.program!r}"
            raise KeyError(f"{name!r:.200} {reason}; what a branch has set is read by its name after join()")
        if variable is None:
            known = ", ".join(self.variables()) or "none"
            in_branch = any(child.variable_of(name) for child in self._executor.children())
            hint = "; a branch has it: call join() first" if in_branch else ""
            raise KeyError(f"program {self._run.program!r} has no variable {name!r}; it has: {known}{hint}")
        return variable

    def _finished(self, name: str | Gen[Any] | Select) -> Variable:
        variable, executor = self._awaited(name), self._executor
        variable.feed.wait(lambda: variable.done or executor.failure is not None)
        self._raise_failure()
        return variable

    def _raise_failure(self) -> None:
        if self._executor.failure is not None:
            raise self._executor.failure.error()


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidRequestError("name", f"must be a non-empty string, got {name!r}")
