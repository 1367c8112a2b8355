"""``program.trace()``."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trellis.frontend.tracing.graph import Trace
from trellis.frontend.tracing.rewrite import HOOKS, is_rewritten
from trellis.frontend.tracing.state import TraceGroup, TraceState, parts
from trellis.frontend.tracing.stop import Stop, Untraceable
from trellis.frontend.tracing.symbols import Argument, frozen
from trellis.frontend.tracing.tracer import Tracer

_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def trace_body(
    program: str, body: Callable[..., Any], signature: inspect.Signature, given: Mapping[str, Any]
) -> Trace:
    """Run a program's body once on symbolic arguments, without a backend.

    signature: the program's parameters, without the state. given: the arguments that have a value.
    Nothing that the body does can raise from here: what cannot be followed ends the trace (``Trace.stop``).
    """
    tracer = Tracer()
    arguments, free = _arguments(signature, given)
    result: Any = None
    stop: Stop | None = None
    try:
        rest = [p for p in signature.parameters.values() if p.kind in _REST and p.name not in given]
        if rest:
            star = "*" if rest[0].kind is rest[0].VAR_POSITIONAL else "**"
            raise Untraceable(f"takes any number of arguments ({star}{rest[0].name})")
        if not isinstance(body, types.FunctionType):
            raise Untraceable(f"the program is an object of type {type(body).__name__}, not a def")
        tracer.record.is_async = inspect.iscoroutinefunction(body)
        traced = tracer.rewrite(body)
        bound = inspect.BoundArguments(signature, arguments)
        result = frozen(_call(traced, TraceState(tracer.record, 0), bound))
        _check_result(result)
    except Untraceable as error:
        stop = _stop(error.reason, error, body)
    except Exception as error:
        stop = _stop(f"raises {type(error).__name__}: {error}", error, body)
    return Trace(program, free, dict(given), tuple(tracer.record.nodes), stop, result)


def _arguments(
    signature: inspect.Signature, given: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(every argument, given or symbolic; the names of the symbolic ones), in the order of the parameters."""
    arguments: dict[str, Any] = {}
    free = []
    for parameter in signature.parameters.values():
        if parameter.name in given:
            arguments[parameter.name] = given[parameter.name]
        elif parameter.kind not in _REST:
            arguments[parameter.name] = Argument(parameter.name)
            free.append(parameter.name)
    return arguments, tuple(free)


def _call(body: Callable[..., Any], state: TraceState, bound: inspect.BoundArguments) -> Any:
    from trellis.frontend.program import Arguments

    arguments = Arguments.of(bound)
    return body(state, *arguments.args, **arguments.kwargs)


def _check_result(result: Any) -> None:
    for each in parts(result):
        if isinstance(each, TraceGroup) or (isinstance(each, types.FunctionType) and is_rewritten(each)):
            raise Untraceable("returns branches or a function of its own")


def _stop(reason: str, error: BaseException, body: Callable[..., Any]) -> Stop:
    places = list(_places(error))
    if places:
        return Stop(reason, *places[-1])
    code = getattr(body, "__code__", None)
    return Stop(reason, code.co_filename, code.co_firstlineno) if code is not None else Stop(reason)


def _places(error: BaseException) -> Iterator[tuple[str, int]]:
    """Where in the program's source the error passed, from the outside in."""
    at = error.__traceback__
    while at is not None:
        if HOOKS in at.tb_frame.f_code.co_freevars:
            yield at.tb_frame.f_code.co_filename, at.tb_lineno
        at = at.tb_next
