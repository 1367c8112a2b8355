"""Runs a program's body on symbolic arguments, once, without a backend, up to where it stops being straight."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from trellis.frontend.expressions import Expr
from trellis.frontend.program import Program
from trellis.frontend.tracing import pure, symbols
from trellis.frontend.tracing.rewrite import is_rewritten, rewritten_code, with_hooks
from trellis.frontend.tracing.source import Sources
from trellis.frontend.tracing.state import Block, Record, TraceGroup, TraceState
from trellis.frontend.tracing.stop import Untraceable
from trellis.frontend.tracing.symbols import Deferred, Symbol, is_symbolic

_TRACED = (TraceState, TraceGroup)
_GROWING = (str, bytes, int, float, complex, bool, tuple, frozenset)  # += gives a new object
_MUTABLE = (list, dict, set)
_GOING_THROUGH: tuple[Any, ...] = (len, enumerate, zip, list, tuple, reversed)
_MAKE_PROGRAMS = (Program.bind, Program.with_options)
MOST_STEPS = 200_000
"""Calls and rounds of loops in one trace."""


class Tracer:
    """The hooks (see ``rewrite.Hooks``) of one trace."""

    def __init__(self) -> None:
        self.record = Record(self.rewrite)
        self._own: dict[int, Any] = {}  # containers that the body made, kept so that their ids stay theirs
        self._codes: dict[types.CodeType, types.CodeType] = {}
        self._sources = Sources()
        self._steps = 0

    # -- values ------------------------------------------------------------------------------------------------

    def text(self, *parts: Any) -> Any:
        pieces = [part if isinstance(part, str) else symbols.Field(*part) for part in parts]
        fields = [piece for piece in pieces if isinstance(piece, symbols.Field)]
        if any(isinstance(field.value, _TRACED) for field in fields):
            raise Untraceable("formats a state")
        if any(is_symbolic((field.value, field.spec)) for field in fields):
            return symbols.formatted(pieces)
        # Nothing is symbolic: what is formatted is what stands there.
        plain = (
            p if isinstance(p, str) else symbols.format_field(p.value, p.conversion, p.spec) for p in pieces
        )
        return "".join(plain)

    def attribute(self, value: Any, name: str) -> Any:
        if isinstance(value, Symbol):
            return symbols.attribute(value, name)
        if isinstance(value, _TRACED) and name not in value.FOLLOWED:
            what = "state" if isinstance(value, TraceState) else "branches"
            raise Untraceable(f"uses {name!r} of the {what}, which only a run has")
        return getattr(value, name)

    def item(self, value: Any, key: Any) -> Any:
        if isinstance(value, Symbol):
            return symbols.item(value, key)
        return value[key]

    def slice(self, start: Any, stop: Any, step: Any) -> Any:
        bounds = (start, stop, step)
        if is_symbolic(bounds):
            raise Untraceable("a bound of a slice is symbolic")
        return slice(*bounds)

    def identical(self, left: Any, right: Any) -> bool:
        for value in (left, right):
            if isinstance(value, Symbol):
                raise Untraceable(f"compares {value.shown()} by 'is'")
        return left is right

    def concrete(self, value: Any) -> Any:
        if is_symbolic(value):
            raise Untraceable("matches a symbolic value")
        return value

    def iterable(self, value: Any) -> Any:
        if isinstance(value, Symbol):
            raise Untraceable(f"iteration of {value.shown()} depends on its value")
        if not (isinstance(value, TraceGroup) or pure.may_iterate(value)):
            raise Untraceable(
                f"goes through an object of type {type(value).__name__}, which may be used up by it"
            )
        return value

    def searched(self, value: Any) -> Any:
        """The right side of ``in``."""
        if isinstance(value, Symbol):
            raise Untraceable(f"a search in {value.shown()} depends on its value")
        return self.iterable(value)

    # -- containers --------------------------------------------------------------------------------------------

    def new(self, container: Any) -> Any:
        self._own[id(container)] = container
        return container

    def changes(self, container: Any) -> None:
        if not (isinstance(container, _TRACED) or id(container) in self._own):
            kind = type(container).__name__
            raise Untraceable(f"changes an object of type {kind} that the program did not make")

    def grows(self, value: Any) -> None:
        """The left side of ``+=`` and the like."""
        if isinstance(value, Symbol) and not symbols.is_text(value):
            raise Untraceable(
                f"changes {value.shown()} in place, if it is a list; write x = x + ... for a new value"
            )
        if not isinstance(value, (*_TRACED, Expr)) and type(value) not in _GROWING:
            self.changes(value)

    # -- calls -------------------------------------------------------------------------------------------------

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        if isinstance(function, Symbol):
            return self._call_symbol(function, args, kwargs)
        if isinstance(function, types.MethodType) and isinstance(function.__self__, _TRACED):
            if isinstance(function.__self__, TraceGroup):
                function.__self__.call = self.call
            return function(*args, **kwargs)
        if isinstance(function, functools.partial):
            return self.call(function.func, *function.args, *args, **{**function.keywords, **kwargs})
        if self._is_of(function, pure.ROLES):
            return function(*args, **kwargs)
        if isinstance(function, types.FunctionType) and not pure.is_pure(function):
            if self._is_of(function, pure.EXPRESSIONS):
                return self._expression(function, args, kwargs)
            return self.rewrite(function)(*args, **kwargs)
        if isinstance(function, types.MethodType) and function.__func__ in _MAKE_PROGRAMS:
            return function(*args, **kwargs)
        if isinstance(function, types.MethodType) and isinstance(function.__func__, types.FunctionType):
            return self.rewrite(function.__func__)(function.__self__, *args, **kwargs)
        return self._library(function, args, kwargs)

    @staticmethod
    def _is_of(function: Any, known: frozenset[Any]) -> bool:
        return isinstance(function, types.FunctionType) and function in known

    def _call_symbol(self, function: Symbol, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(function, symbols.Computed) and function.function is getattr:
            value, name = function.args
            if name in pure.STR_METHODS:
                return symbols.method(value, name, args, kwargs)
        raise Untraceable(f"calls {function.shown()}, which only a run has")

    def _expression(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if not is_symbolic((args, kwargs)):
            return function(*args, **kwargs)
        name = kwargs.get("name", args[0] if args else None)
        if is_symbolic(name):
            raise Untraceable("the name of a variable is symbolic")
        return Deferred(function, name, symbols.frozen(args), symbols.frozen(dict(kwargs)))

    def rewrite(self, function: types.FunctionType) -> types.FunctionType:
        if is_rewritten(function):
            return function
        if not pure.may_follow(function):
            raise Untraceable(f"calls {pure.called(function)}, which may do more than compute")
        code = self._codes.get(function.__code__)
        if code is None:
            try:
                code = self._codes[function.__code__] = rewritten_code(function, self._sources)
            except Untraceable as error:
                raise Untraceable(f"calls {pure.called(function)}: {error.reason}") from None
        return with_hooks(function, code, self)

    def _library(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        changing = pure.is_method_of(function, _MUTABLE) and not pure.is_pure(function)
        if changing:
            self.changes(function.__self__)
        elif not pure.is_pure(function):
            raise Untraceable(f"calls {pure.called(function)}, which may do more than compute")
        for value in (*args, *kwargs.values()):
            self._check_passed(function, value)
        if not changing and is_symbolic((args, dict(kwargs))):
            return self._on_symbols(function, args, kwargs)
        return self._kept(function(*args, **kwargs))

    def _check_passed(self, function: Any, value: Any) -> None:
        if isinstance(value, (Expr, type)):
            return
        if isinstance(value, _TRACED) and not (isinstance(value, TraceGroup) and function in _GOING_THROUGH):
            if not (pure.is_method_of(function, _MUTABLE) and isinstance(value, TraceState)):
                raise Untraceable(f"calls {pure.called(function)} with a state")
        elif hasattr(type(value), "__next__"):
            self.iterable(value)
        elif callable(value) and not (isinstance(value, types.FunctionType) and is_rewritten(value)):
            raise Untraceable(f"passes a function to {pure.called(function)}")

    def _on_symbols(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if pure.is_method_of(function, (str,)) and function.__name__ in pure.STR_METHODS:
            return symbols.method(function.__self__, function.__name__, args, kwargs)
        if any(function is each for each in pure.RECORDED):
            return symbols.applied(function, args, kwargs)
        if function in (dict, *_GOING_THROUGH) and not any(isinstance(a, Symbol) for a in args):
            return self._kept(function(*args, **kwargs))
        first = next(symbols.symbols_of((args, dict(kwargs))))
        raise Untraceable(f"{pure.called(function)} depends on the value of {first.shown()}")

    def _kept(self, result: Any) -> Any:
        """A container that a call of the body has made is the body's own."""
        return self.new(result) if type(result) in _MUTABLE else result

    # -- control -----------------------------------------------------------------------------------------------

    def entered(self, value: Any) -> Any:
        if isinstance(value, (TraceGroup, Block)):
            return value
        raise Untraceable(f"enters a with block of type {type(value).__name__}")

    def imports(self, module: str) -> None:
        if module not in sys.modules:
            raise Untraceable(f"imports {module!r}, which is not loaded yet")

    def tick(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise Untraceable(f"the trace has taken {MOST_STEPS:,} steps")

    def stop(self, reason: str) -> None:
        raise Untraceable(reason)
