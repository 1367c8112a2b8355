"""Programs: Python functions whose first parameter is the state that they write to."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from trellis.frontend.defaults import DEFAULTS
from trellis.frontend.executor import Executor
from trellis.frontend.parameters import RUN_OPTION_NAMES, RunOptions
from trellis.frontend.run import Run
from trellis.frontend.state import ProgramState
from trellis.frontend.suggest import did_you_mean
from trellis.frontend.tracing.methods import Traceable

if TYPE_CHECKING:
    from trellis.frontend.async_state import AsyncProgramState
    from trellis.frontend.batch import BatchItem

Body = Callable[..., Any]
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Program(Traceable):
    """What ``@function`` makes of a function. Immutable: ``bind`` and ``with_options`` return new programs.

    A keyword that the function declares always goes to the function; any other one must be a run option. A
    program that has an argument named like a run option gets that option through ``with_options``.
    """

    def __init__(
        self, body: Body, bound: Mapping[str, Any] | None = None, options: RunOptions | None = None
    ) -> None:
        functools.update_wrapper(self, body)
        self.body = body
        self.name: str = getattr(body, "__name__", type(body).__name__)
        self._bound = dict(bound or {})
        self._options = options or RunOptions()
        self._signature = _signature(body, self.name, self._bound)
        self.__signature__ = self._signature  # else ``inspect`` shows that of the body, with the state
        self.is_async = inspect.iscoroutinefunction(body) or inspect.iscoroutinefunction(
            getattr(body, "__call__", None)  # noqa: B004 (of an object, whose class may have an async one)
        )

    def run(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the program and return its state.

        args, kwargs: the function's own arguments. Further keywords are run options:
        max_tokens (128), min_tokens, temperature (1.0), top_p, top_k, min_p, frequency_penalty,
        presence_penalty, repetition_penalty, stop, stop_token_ids, ignore_eos, seed, return_logprob,
        top_logprobs_num, token_healing: for every gen that does not say otherwise. max_new_tokens and min_new_tokens, as servers
        call them, are other names of the first two.
        num_api_spec_tokens: on a completions API, let a gen's call write on for so many tokens, and answer the gens that
        follow out of that text, as long as the program writes what came; other backends ignore it.
        backend: where to run; the default backend if not given.
        timeout: seconds for the whole program; the cause of the failure is then a TimeoutError.
        stream: return the state at once and run the body in a thread; ``text_iter`` shows the text as it comes.

        Without stream, returns when everything that the program started has ended. Raises what the body raises,
        unchanged, and ProgramError when the backend fails; either way, as on Ctrl-C, requests under way are aborted.

        The body of an ``async def`` program runs in the background event loop of all programs.
        """
        arguments, options = self._split(args, kwargs)
        root = self._root(options)
        if self.is_async:
            from trellis.frontend import async_run

            begin = async_run.start if options.stream else async_run.block_on
            begin(root.run.loop, functools.partial(self._drive_async, root, arguments))
        elif options.stream:
            threading.Thread(
                target=self._drive_quietly,
                args=(root, arguments),
                name=f"trellis-{self.name}",
                daemon=True,
            ).start()
        else:
            self._drive(root, arguments)
        return ProgramState(root.run, root, inside=False)

    __call__ = run

    @overload
    async def run_async(self, *args: Any, stream: Literal[True], **kwargs: Any) -> AsyncProgramState: ...
    @overload
    async def run_async(self, *args: Any, stream: Literal[False] = False, **kwargs: Any) -> ProgramState: ...
    async def run_async(self, *args: Any, **kwargs: Any) -> ProgramState | AsyncProgramState:
        """``run`` for a coroutine, in any event loop, of any program: ``state = await program.run_async("France")``.

        The body of an ``async def`` program runs as a task of this loop, that of a plain one in a thread. The state
        is complete, so reading it does not wait. With ``stream=True`` an ``AsyncProgramState`` comes at once:
        ``async for piece in state.text_iter()``. Cancelling the task that awaits this aborts the requests.
        """
        from trellis.frontend import async_run

        arguments, options = self._split(args, kwargs)
        root = self._root(options)
        if options.stream:
            return async_run.start_here(root, self._drive_async(root, arguments))
        await self._drive_async(root, arguments)
        return ProgramState(root.run, root, inside=False)

    def run_batch(
        self,
        batch: Sequence[BatchItem],
        *,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        on_error: str = "raise",
        batch_timeout: float | None = None,
        **options: Any,
    ) -> list[ProgramState]:
        """Run the program on many arguments at once. Returns the states in the order of ``batch``.

        batch: for each run a dict of keyword arguments or a tuple of positional ones. All are checked before
            the first one starts (TypeError names the item).
        num_threads: bodies that are at work at the same time; ``auto`` is 16 a CPU, at least 96. Those of an
            ``async def`` program need no threads; ``auto`` is 1024.
        on_error: ``raise`` raises the first error and cancels the others. ``return`` lets every item end for
            itself; ``state.error()`` tells which have failed and why.
        batch_timeout: seconds for the whole batch; what is not done then fails with TimeoutError.
        options: run options as for ``run``, except stream; timeout counts for each item.
        """
        from trellis.frontend.batch import BatchOptions, run_items

        how = BatchOptions.checked(num_threads, progress_bar, on_error, batch_timeout)
        items = self._items(batch, options)
        states = [ProgramState(root.run, root, inside=False) for root, _ in items]
        if self.is_async:
            from trellis.frontend.async_batch import run_items_async
            from trellis.frontend.async_run import block_on

            async_jobs = [functools.partial(self._drive_async, *item) for item in items]
            block_on(DEFAULTS.loop, functools.partial(run_items_async, self.name, states, async_jobs, how))
        else:
            jobs = [functools.partial(self._drive, *item) for item in items]
            run_items(self.name, states, jobs, how)
        return states

    async def run_batch_async(
        self,
        batch: Sequence[BatchItem],
        *,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        on_error: str = "raise",
        batch_timeout: float | None = None,
        **options: Any,
    ) -> list[ProgramState]:
        """``run_batch`` for a coroutine, in any event loop, of any program. Cancelling the task that awaits it aborts
        the requests of all items."""
        from trellis.frontend.async_batch import run_items_async
        from trellis.frontend.batch import BatchOptions

        how = BatchOptions.checked(num_threads, progress_bar, on_error, batch_timeout)
        items = self._items(batch, options)
        states = [ProgramState(root.run, root, inside=False) for root, _ in items]
        if not self.is_async:
            how = how.of_threads()
        jobs = [functools.partial(self._drive_async, *item) for item in items]
        await run_items_async(self.name, states, jobs, how)
        return states

    def bind(self, **arguments: Any) -> Program:
        """A program with some arguments given. As with ``functools.partial``, a keyword at the call wins over a bound
        one, and positional arguments fill the parameters that are left."""
        return Program(self.body, {**self._bound, **arguments}, self._options)

    def with_options(self, **options: Any) -> Program:
        """A program with other defaults for its run options."""
        return Program(self.body, self._bound, self._options.updated(_known_options(self.name, options)))

    def __reduce__(self) -> tuple[Any, ...]:
        # Its body cannot be found by its name, where the module has the program. So the name of that is what is kept.
        name = getattr(self.body, "__qualname__", self.name)
        if "<" in name:
            raise TypeError(
                f"{self!r} cannot be pickled: a module must have it under its name, not a function"
            )
        return _found, (self.body.__module__, name, self._bound, self._options)

    def __copy__(self) -> Program:
        return self  # it never changes

    def __deepcopy__(self, _memo: object) -> Program:
        return self

    def __repr__(self) -> str:
        return f"<Program {self.name}{self._signature}>"

    # -- arguments ---------------------------------------------------------------------------------------------

    def _split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], base: RunOptions | None = None
    ) -> tuple[Arguments, RunOptions]:
        """(the body's arguments, ``base`` or else the program's options with those of the call)."""
        parameters = self._signature.parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        own, options = {}, {}
        for name, value in kwargs.items():
            declared = name in parameters and parameters[name].kind in _NAMED
            if declared or (takes_any and name not in RUN_OPTION_NAMES):
                own[name] = value
            else:
                options[name] = value
        known = _known_options(self.name, options, also=list(parameters))
        return self._bind(args, own), (base or self._options).updated(known)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        try:
            found = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"program {self.name!r}: {error}; it takes {_bare(self._signature)}") from None
        found.apply_defaults()
        return Arguments.of(found)

    def _item(self, index: int, item: BatchItem) -> Arguments:
        try:
            if isinstance(item, Mapping):
                return self._bind((), item)
            if isinstance(item, (tuple, list)):
                return self._bind(item, {})
        except TypeError as error:
            raise TypeError(f"run_batch item {index}: {error}") from None
        raise TypeError(
            f"run_batch item {index}: must be a dict of keyword arguments or a tuple of positional ones, got {item!r}"
        )

    def _items(
        self, batch: Sequence[BatchItem], options: Mapping[str, Any]
    ) -> list[tuple[Executor, Arguments]]:
        """A state and the arguments of every item; all are checked before the first one starts."""
        if "stream" in options:
            raise TypeError("run_batch: stream is not possible; iterate over run(stream=True) instead")
        chosen = self._options.updated(_known_options(self.name, options))
        arguments = [self._item(index, item) for index, item in enumerate(batch)]
        return [(self._root(chosen), each) for each in arguments]

    # -- running -----------------------------------------------------------------------------------------------

    def _root(self, options: RunOptions) -> Executor:
        return Executor(Run(self.name, DEFAULTS.backend(options.backend), options, DEFAULTS.loop))

    def _drive(self, root: Executor, arguments: Arguments) -> None:
        """Run the body in this thread and wait for everything that it started."""
        if root.failure is not None:
            raise root.failure.error()
        run = root.run
        timer = run.start_timer(root)
        try:
            run.return_value = self._call(arguments, ProgramState(run, root, inside=True))
            run.end_body(root)
            root.wait_family()
        except BaseException as error:
            root.fail(error, by_body=True)
            raise
        finally:
            run.end_body(root)
            if timer is not None:
                timer.cancel()

    def _call(self, arguments: Arguments, state: ProgramState | AsyncProgramState) -> Any:
        result = self.body(state, *arguments.args, **arguments.kwargs)
        if not self.is_async and inspect.iscoroutine(result):
            result.close()
            raise TypeError(
                f"program {self.name!r}: its body gave a coroutine, but is no 'async def'; a decorator of one must be "
                "an 'async def', too"
            )
        return result

    def _drive_async(self, root: Executor, arguments: Arguments) -> Coroutine[Any, Any, None]:
        """Run the body, of either kind, from a coroutine, and wait for everything that it started."""
        from trellis.frontend import async_run

        if self.is_async:
            return async_run.drive(root, functools.partial(self._call, arguments))
        return async_run.in_thread(root, functools.partial(self._drive, root, arguments))

    def _drive_quietly(self, root: Executor, arguments: Arguments) -> None:
        # The state holds the error, and whoever reads it gets it.
        with contextlib.suppress(Exception):
            self._drive(root, arguments)


class Arguments:
    """Arguments in the form in which the body takes them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs

    @staticmethod
    def of(found: inspect.BoundArguments) -> Arguments:
        """Names wherever possible, since bound parameters may stand before free ones."""
        rest = any(p.kind is p.VAR_POSITIONAL for p in found.signature.parameters.values())
        if rest:
            return Arguments(found.args, found.kwargs)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, value in found.arguments.items():
            kind = found.signature.parameters[name].kind
            if kind is inspect.Parameter.POSITIONAL_ONLY:
                args.append(value)
            elif kind is inspect.Parameter.VAR_KEYWORD:
                kwargs.update(value)
            else:
                kwargs[name] = value
        return Arguments(tuple(args), kwargs)


def _signature(body: Body, name: str, bound: Mapping[str, Any]) -> inspect.Signature:
    """The parameters after the state; bound ones can be given by keyword only and have a default."""
    parameters = list(inspect.signature(body).parameters.values())
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise TypeError(f"program {name!r}: its first parameter receives the state; write def {name}(s, ...)")
    free = {p.name: p for p in parameters[1:]}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in free.values())
    given: list[inspect.Parameter] = []
    for argument, value in bound.items():
        parameter = free.get(argument)
        if (parameter is None or parameter.kind not in _NAMED) and not takes_any:
            has = ", ".join(n for n, p in free.items() if p.kind in _NAMED) or "none"
            raise TypeError(f"program {name!r} has no argument {argument!r} to bind; it has: {has}")
        free.pop(argument, None)
        given.append(inspect.Parameter(argument, inspect.Parameter.KEYWORD_ONLY, default=value))
    left = list(free.values())
    last = [left.pop()] if left and left[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    return inspect.Signature([*left, *given, *last])


def _bare(signature: inspect.Signature) -> str:
    """Names and defaults, without annotations."""
    none = inspect.Parameter.empty
    return str(
        signature.replace(parameters=[p.replace(annotation=none) for p in signature.parameters.values()])
    )


def _found(module: str, name: str, bound: Mapping[str, Any], options: RunOptions) -> Program:
    """A program that was pickled: its body is what the module has under the name, with the decorator or without."""
    import importlib

    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return Program(found.body if isinstance(found, Program) else found, bound, options)


def _known_options(program: str, options: Mapping[str, Any], also: Sequence[str] = ()) -> Mapping[str, Any]:
    for name in options:
        if name not in RUN_OPTION_NAMES:
            hint = did_you_mean(name, [*also, *RUN_OPTION_NAMES])
            raise TypeError(f"program {program!r}: {name!r} is neither an argument nor a run option{hint}")
    return options


@overload
def function(body: Body) -> Program: ...
@overload
def function(*, num_api_spec_tokens: int | None = None) -> Callable[[Body], Program]: ...
def function(
    body: Body | None = None, *, num_api_spec_tokens: int | None = None
) -> Program | Callable[[Body], Program]:
    """Make a program of a function. Its first parameter, of any name, receives the state::

    @function
    def capital(s, country):
        s += "The capital of " + country + " is" + gen("answer", stop=".")

    print(capital.run("France")["answer"])

    The body of an ``async def`` receives an ``AsyncProgramState``, whose reads are awaited.

    num_api_spec_tokens: the program's own default of this run option: ``@function(num_api_spec_tokens=128)``.
    """
    if body is None:
        return functools.partial(function, num_api_spec_tokens=num_api_spec_tokens)
    if isinstance(body, Program):
        raise TypeError(f"{body!r} is a program already; bind and with_options make others of it")
    if inspect.isclass(body):
        raise TypeError(f"a program is made of a function, got the class {body.__name__!r}")
    if inspect.isasyncgenfunction(body) or inspect.isgeneratorfunction(body):
        raise TypeError(f"program {body.__name__!r} has a yield; append with s += ... instead")
    return Program(body, options=RunOptions().updated({"num_api_spec_tokens": num_api_spec_tokens}))
