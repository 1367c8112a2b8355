"""Programs: Python functions whose first parameter is the state that they write to."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from trellis.frontend.defaults import DEFAULTS
from trellis.frontend.executor import Executor
from trellis.frontend.parameters import RUN_OPTION_NAMES, RunOptions
from trellis.frontend.run import Run
from trellis.frontend.state import ProgramState
from trellis.frontend.suggest import did_you_mean

if TYPE_CHECKING:
    from trellis.frontend.batch import BatchItem

Body = Callable[..., Any]
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Program:
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

    def run(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the program and return its state.

        args, kwargs: the function's own arguments. Further keywords are run options:
        max_tokens (128), min_tokens, temperature (1.0), top_p, top_k, min_p, frequency_penalty,
        presence_penalty, repetition_penalty, stop, stop_token_ids, ignore_eos, seed, return_logprob,
        top_logprobs_num, token_healing: for every gen that does not say otherwise. max_new_tokens and min_new_tokens, as servers
        call them, are other names of the first two.
        backend: where to run; the default backend if not given.
        timeout: seconds for the whole program; the cause of the failure is then a TimeoutError.
        stream: return the state at once and run the body in a thread; ``text_iter`` shows the text as it comes.

        Without stream, returns when everything that the program started has ended. Raises what the body raises,
        unchanged, and ProgramError when the backend fails; either way, as on Ctrl-C, requests under way are aborted.
        """
        arguments, options = self._split(args, kwargs)
        root = self._root(options)
        if options.stream:
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

    def run_batch(
        self,
        batch: Sequence[BatchItem],
        *,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        on_error: str = "raise",
        **options: Any,
    ) -> list[ProgramState]:
        """Run the program on many arguments at once. Returns the states in the order of ``batch``.

        batch: for each run a dict of keyword arguments or a tuple of positional ones. All are checked before
            the first one starts (TypeError names the item).
        num_threads: bodies that run at the same time; ``auto`` is 16 a CPU, at least 96.
        on_error: ``raise`` raises the first error and cancels the others. ``return`` lets every item end for
            itself; ``state.error()`` tells which have failed and why.
        options: run options as for ``run``, except stream; timeout counts for each item.
        """
        from trellis.frontend.batch import run_items

        if "stream" in options:
            raise TypeError("run_batch: stream is not possible; iterate over run(stream=True) instead")
        chosen = self._options.updated(_known_options(self.name, options))
        arguments = [self._item(index, item) for index, item in enumerate(batch)]
        roots = [self._root(chosen) for _ in arguments]
        states = [ProgramState(root.run, root, inside=False) for root in roots]
        jobs = [functools.partial(self._drive, *each) for each in zip(roots, arguments, strict=True)]
        run_items(self.name, states, jobs, num_threads, progress_bar, on_error)
        return states

    def bind(self, **arguments: Any) -> Program:
        """A program with some arguments given. As with ``functools.partial``, a keyword at the call wins over a bound
        one, and positional arguments fill the parameters that are left."""
        return Program(self.body, {**self._bound, **arguments}, self._options)

    def with_options(self, **options: Any) -> Program:
        """A program with other defaults for its run options."""
        return Program(self.body, self._bound, self._options.updated(_known_options(self.name, options)))

    def __repr__(self) -> str:
        return f"<Program {self.name}{self._signature}>"

    # -- arguments ---------------------------------------------------------------------------------------------

    def _split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[_Arguments, RunOptions]:
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
        return self._bind(args, own), self._options.updated(known)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Arguments:
        try:
            found = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"program {self.name!r}: {error}") from None
        found.apply_defaults()
        return _Arguments.of(found)

    def _item(self, index: int, item: BatchItem) -> _Arguments:
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

    # -- running -----------------------------------------------------------------------------------------------

    def _root(self, options: RunOptions) -> Executor:
        return Executor(Run(self.name, DEFAULTS.backend(options.backend), options, DEFAULTS.loop))

    def _drive(self, root: Executor, arguments: _Arguments) -> None:
        """Run the body in this thread and wait for everything that it started."""
        run = root.run
        timer = None
        timeout = run.options.timeout
        if timeout is not None:
            late = TimeoutError(f"the program was not done within its timeout of {timeout:g} s")
            timer = run.loop.after(timeout, lambda: root.fail(late))
        try:
            state = ProgramState(run, root, inside=True)
            run.return_value = self.body(state, *arguments.args, **arguments.kwargs)
            run.end_body(root)
            root.wait_family()
        except BaseException as error:
            root.fail(error)
            raise
        finally:
            run.end_body(root)
            if timer is not None:
                timer.cancel()

    def _drive_quietly(self, root: Executor, arguments: _Arguments) -> None:
        # The state holds the error, and whoever reads it gets it.
        with contextlib.suppress(Exception):
            self._drive(root, arguments)


class _Arguments:
    """Arguments in the form in which the body takes them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs

    @staticmethod
    def of(found: inspect.BoundArguments) -> _Arguments:
        """Names wherever possible, since bound parameters may stand before free ones."""
        rest = any(p.kind is p.VAR_POSITIONAL for p in found.signature.parameters.values())
        if rest:
            return _Arguments(found.args, found.kwargs)
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
        return _Arguments(tuple(args), kwargs)


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


def _known_options(program: str, options: Mapping[str, Any], also: Sequence[str] = ()) -> Mapping[str, Any]:
    for name in options:
        if name not in RUN_OPTION_NAMES:
            hint = did_you_mean(name, [*also, *RUN_OPTION_NAMES])
            raise TypeError(f"program {program!r}: {name!r} is neither an argument nor a run option{hint}")
    return options


@overload
def function(body: Body) -> Program: ...
@overload
def function() -> Callable[[Body], Program]: ...
def function(body: Body | None = None) -> Program | Callable[[Body], Program]:
    """Make a program of a function. Its first parameter, of any name, receives the state::

    @function
    def capital(s, country):
        s += "The capital of " + country + " is" + gen("answer", stop=".")

    print(capital.run("France")["answer"])
    """
    if body is None:
        return function
    if inspect.iscoroutinefunction(body):
        raise TypeError(f"program {body.__name__!r} is an 'async def'; write it as a plain 'def'")
    return Program(body)
