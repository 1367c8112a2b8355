"""The state of an async program: appended to as any state, and read with ``await``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeAlias, TypeVar, overload

from trellis.errors import ProgramError
from trellis.frontend.expressions import Appendable, Gen, Select
from trellis.frontend.parameters import RunOptions
from trellis.frontend.price import Price
from trellis.frontend.report import Report
from trellis.frontend.state import ProgramState

if TYPE_CHECKING:
    from trellis.frontend.async_group import AsyncProgramStateGroup
    from trellis.frontend.program import Program
    from trellis.frontend.timelines import Timeline

T = TypeVar("T")
Key: TypeAlias = "str | Gen[Any] | Select"
"""A variable: its name, or the very expression that was appended."""


class Read(Generic[T]):
    """What reading an async state gives: ``await`` it for the value, once or more often.

    It has no text and no truth value, so that a forgotten ``await`` is an error and not a strange prompt.
    """

    __slots__ = ("_get", "_ready", "_what")

    def __init__(self, what: str, ready: Callable[[], Awaitable[None]], get: Callable[[], T]) -> None:
        self._what = what
        self._ready = ready
        self._get = get

    def __await__(self) -> Generator[Any, None, T]:
        yield from self._ready().__await__()
        return self._get()

    def __repr__(self) -> str:
        return f"<{self._what}, to be awaited>"

    def _forgotten(self) -> TypeError:
        return TypeError(f"{self._what} of an async program is read with await: await {self._what}")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{self._what} of an async program is read with await: (await {self._what}).{name}"
        )

    def __str__(self) -> str:
        raise self._forgotten()

    def __format__(self, _spec: str) -> str:
        raise self._forgotten()

    def __bool__(self) -> bool:
        raise self._forgotten()

    def __eq__(self, other: object) -> bool:
        raise self._forgotten()

    __hash__ = object.__hash__  # ``asyncio.gather`` looks for awaitables that come twice


def _refuse(read: Read[Any], *_: object) -> NoReturn:
    raise read._forgotten()


# What a value is used with. Set here, so that a type checker knows none of it and finds the mistake first.
for _use in (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__mod__", "__rmod__"),
    *("__truediv__", "__rtruediv__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__len__", "__iter__", "__contains__", "__getitem__", "__int__", "__float__", "__index__"),
):
    setattr(Read, _use, _refuse)


class AsyncProgramState:
    """What the body of an ``async def`` program receives, and what ``await program.run_async(stream=True)`` gives.

    Appending is as in any program and returns at once; every read is awaited: ``await s["x"]``,
    ``await s.text()``. Failures are raised by reads and appends as ``ProgramState`` says. Cancelling the task
    that runs the program aborts its requests.
    """

    def __init__(self, state: ProgramState) -> None:
        self._state = state

    @property
    def options(self) -> RunOptions:
        """What its gens inherit."""
        return self._state.options

    @property
    def return_value(self) -> Any:
        """What the program's body returned; does not wait."""
        return self._state.return_value

    # -- appending ---------------------------------------------------------------------------------------------

    def __iadd__(self, expr: Appendable) -> AsyncProgramState:
        if isinstance(expr, Read):
            raise expr._forgotten()
        self._state.__iadd__(expr)
        return self

    def __add__(self, _other: Appendable) -> NoReturn:
        raise TypeError("a state is not added to: append with s += ...")

    __radd__ = __add__
    __iter__ = None  # without it, Python would go through s[0], s[1] and so on, without end

    def role(self, name: str, expr: Appendable | None = None) -> AsyncBlock:
        """A message of any role: ``s.role("user", "Hi")``, or ``with s.role("user"): ...`` (also ``async with``)."""
        return AsyncBlock(self, self._state.role(name, expr))

    def system(self, expr: Appendable | None = None) -> AsyncBlock:
        """``s.system("Be brief.")``, or ``with s.system(): ...``."""
        return self.role("system", expr)

    def user(self, expr: Appendable | None = None) -> AsyncBlock:
        """``s.user("Hi")``, or ``with s.user(): ...``."""
        return self.role("user", expr)

    def assistant(self, expr: Appendable | None = None) -> AsyncBlock:
        """``s.assistant(gen("x"))``, or ``with s.assistant(): ...``."""
        return self.role("assistant", expr)

    def var_scope(self, name: str) -> AsyncBlock:
        """``with s.var_scope("sheet"): ...``: all text that is appended inside becomes the variable ``sheet``."""
        return AsyncBlock(self, self._state.var_scope(name))

    async def run(self, program: Program, *args: Any, **kwargs: Any) -> Any:
        """``await s.run(rate, topic)``: run another program, of either kind, on this state, as ``ProgramState.run``.
        The body of a plain one runs in a thread."""
        from trellis.frontend.async_subprogram import run_on

        return await run_on(self, program, args, kwargs)

    async def gather(self, on_error: str = "raise", **programs: Program) -> dict[str, Any]:
        """``await s.gather(pro=..., con=...)``: run programs, of either kind, side by side, each on a fork of this state,
        as ``ProgramState.gather``."""
        from trellis.frontend.async_subprogram import gather_on

        return await gather_on(self, programs, on_error)

    def set(self, name: str, value: Any) -> None:
        """Set a variable from Python; it adds no text. ``set_var`` is the same."""
        if isinstance(value, Read):
            raise value._forgotten()
        self._state.set(name, value)

    set_var = set

    def __setitem__(self, name: str, value: Any) -> None:
        self.set(name, value)

    # -- reading -----------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, name: Gen[T]) -> Read[T]: ...
    @overload
    def __getitem__(self, name: Select) -> Read[str]: ...
    @overload
    def __getitem__(self, name: str) -> Read[Any]: ...
    def __getitem__(self, name: Key) -> Read[Any]:
        """``await s["x"]``: the value. KeyError if the program never sets it, ProgramError if it has none."""
        return self._read("s[{}]", name, lambda: self._state[name])

    @overload
    def get(self, name: Gen[T]) -> Read[T]: ...
    @overload
    def get(self, name: Select) -> Read[str]: ...
    @overload
    def get(self, name: str, type: type[T]) -> Read[T]: ...
    @overload
    def get(self, name: str) -> Read[Any]: ...
    def get(self, name: Key, type: Any = Any) -> Read[Any]:
        """``await s.get("x", Person)``: the value, for a type checker as well. TypeError if it is not one."""
        state: Any = self._state  # its overloads do not take what the overloads here have told apart
        return self._read("s.get({})", name, lambda: state.get(name, type))

    get_var = get

    def __contains__(self, name: Key) -> bool:
        """Whether the variable is set or on its way; does not wait."""
        return name in self._state

    def variables(self) -> list[str]:
        """Names of all variables, in the order in which they were first appended; does not wait."""
        return self._state.variables()

    @overload
    def text(self) -> Read[str]: ...
    @overload
    def text(self, name: Key) -> Read[Any]: ...
    def text(self, name: Key | None = None) -> Read[Any]:
        """The whole text so far, or the text of one variable (a list for a joined one)."""
        if name is None:
            return Read("s.text()", self._idle, self._state.text)
        return self._read("s.text({})", name, lambda: self._state.text(name))

    def meta(self, name: Key) -> Read[Any]:
        """``Meta`` of a gen, ``SelectMeta`` of a select, a list of them for a joined variable."""
        return self._read("s.meta({})", name, lambda: self._state.meta(name))

    def messages(self) -> Read[list[dict[str, str]]]:
        """``[{"role": ..., "content": ...}]`` of the roles that have ended."""
        return Read("s.messages()", self._idle, self._state.messages)

    def sync(self) -> Read[None]:
        """Wait until all that was appended has run."""
        return Read("s.sync()", self._idle, self._state.sync)

    def error(self) -> Read[ProgramError | None]:
        """Wait for what was appended, and give the error instead of raising it. None if all is well."""
        return Read("s.error()", self._idle, self._state.error)

    def report(self, price: Price | None = None) -> Read[Report]:
        """Each variable's tokens, time and cost, as a table (see ``ProgramState``). Waits, but never raises."""
        return Read("s.report()", self._idle, lambda: self._state.report(price))

    def timeline(self) -> Timeline:
        """When each gen and select was appended, sent, answered and done; does not wait."""
        return self._state.timeline()

    def _repr_html_(self) -> str:
        return self._state._repr_html_()

    def partial_text(self) -> str:
        """The text so far, of a state that runs, has ended or has failed; neither waits nor raises."""
        return self._state.partial_text()

    def text_iter(self, var: Key | None = None, sample: int = 0) -> AsyncIterator[str]:
        """The whole text, or one variable's, piece by piece: ``async for piece in s.text_iter("x")``.

        The pieces come as the model writes them where the run has ``stream=True``, and add up to the final text.
        sample: which one, of a gen with several.
        """
        return self._state.text_async_iter(var, sample)

    text_async_iter = text_iter

    def _read(self, what: str, name: Key, get: Callable[[], T]) -> Read[T]:
        shown = repr(name) if isinstance(name, str) else "..."
        return Read(what.format(shown), lambda: self._variable_ready(name), get)

    async def _idle(self) -> None:
        state = self._state
        await state._executor.feed.wait_async(lambda: state._executor.ended(state._inside))

    async def _variable_ready(self, name: Key) -> None:
        """Until the variable is decided, or known not to come, or the state has failed: then nothing waits."""
        state, executor = self._state, self._state._executor
        if not executor.known(name, state._inside):
            await executor.feed.wait_async(lambda: executor.known(name, state._inside))
        variable = executor.variable_of(name)
        if variable is not None and not (variable.is_open and state._inside):
            await variable.feed.wait_async(lambda: variable.done or executor.failure is not None)

    # -- forking and ending ------------------------------------------------------------------------------------

    def fork(self, n: int = 1) -> AsyncProgramStateGroup:
        """n states that go on from here, each on its own; ``await branches.join()`` brings them together."""
        from trellis.frontend.async_group import AsyncProgramStateGroup

        return AsyncProgramStateGroup(self, self._state.fork(n))

    def copy(self) -> AsyncProgramState:
        """One state that goes on from here on its own."""
        return self.fork(1)[0]

    def cancel(self, reason: str = "cancelled by the program") -> None:
        """End this state and its forks, as ``ProgramState.cancel``."""
        self._state.cancel(reason)

    async def __aenter__(self) -> AsyncProgramState:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leaving ``async with await program.run_async(stream=True) as s:`` cancels what is unfinished."""
        self.cancel("its async with block was left")

    def __repr__(self) -> str:
        return repr(self._state).replace("<ProgramState", "<AsyncProgramState", 1)


class AsyncBlock:
    """``with s.user(): ...`` or ``async with s.user(): ...``; neither waits."""

    def __init__(self, state: AsyncProgramState, opened: AbstractContextManager[ProgramState]) -> None:
        self._state = state
        self._opened = opened

    def __enter__(self) -> AsyncProgramState:
        self._opened.__enter__()
        return self._state

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._opened.__exit__(kind, error, trace)

    async def __aenter__(self) -> AsyncProgramState:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self.__exit__(kind, error, trace)
