"""The states that a traced body writes to: everything is noted down, nothing runs."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from trellis.frontend.expressions import Expr, Gen, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Select, as_expr
from trellis.frontend.expressions import role as role_expr
from trellis.frontend.parameters import RUN_OPTION_NAMES
from trellis.frontend.tracing.graph import Append, Call, Fork, Join, Node, Read, Set, Sync, What
from trellis.frontend.tracing.rewrite import HOOKS
from trellis.frontend.tracing.stop import Untraceable
from trellis.frontend.tracing.symbols import (
    Deferred,
    Reading,
    Symbol,
    applied,
    frozen,
    is_symbolic,
    is_text,
    item,
)
from trellis.frontend.values import checked

Key = str | Gen[Any] | Select

MOST_NODES = 20_000


class Record:
    """The nodes so far, of all states. follow: makes of a body one that is traced. is_async: the program is."""

    def __init__(self, follow: Callable[[types.FunctionType], Callable[..., Any]]) -> None:
        self.follow = follow
        self.is_async = False
        self.nodes: list[Node] = []
        self.states = 1
        self.readings = 0

    def add(self, state: TraceState, what: What) -> None:
        if len(self.nodes) == MOST_NODES:
            raise Untraceable(f"the program has more than {MOST_NODES:,} parts")
        self.nodes.append(Node(len(self.nodes), state.number, line_of_body(), what, state.calls))


def line_of_body() -> int | None:
    """The line that the innermost rewritten function is at."""
    frame = sys._getframe(1)
    while frame is not None:
        if HOOKS in frame.f_code.co_freevars:
            return frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


class Block:
    """``with s.user():`` or ``with s.var_scope("x"):``; first is appended where it is entered, last where it ends."""

    def __init__(self, state: TraceState, first: Expr | None = None, last: Expr | None = None) -> None:
        self._state = state
        self._first = first
        self._last = last

    def __enter__(self) -> TraceState:
        if self._first is not None:
            self._state.append(self._first)
        return self._state

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._last is not None and kind is None:
            self._state.append(self._last)


class TraceState:
    """Takes the place of a ProgramState. known: the variables that it has; own: those set since its fork."""

    FOLLOWED = frozenset(
        {"role", "system", "user", "assistant", "var_scope", "run", "set", "set_var", "get", "get_var"}
        | {"text", "meta", "messages", "sync", "fork", "copy"}
    )

    def __init__(self, record: Record, number: int, known: frozenset[str] = frozenset()) -> None:
        self.record = record
        self.number = number
        self.known = set(known)
        self.own: set[str] = set()
        self.joined: dict[str, int] = {}  # variables that are lists, and of how many branches or samples
        self.leaves: dict[int, Expr] = {}  # gens and selects, by their ids
        self.calls: tuple[Call, ...] = ()

    def __iadd__(self, expr: Any) -> TraceState:
        for leaf in as_expr(expr).leaves():
            self.append(leaf)
        return self

    def append(self, leaf: Expr) -> None:
        self.record.add(self, Append(leaf))
        self.leaves[id(leaf)] = leaf
        if isinstance(leaf, (Gen, Select, Deferred, ScopeBegin)) and leaf.name is not None:
            self.define(leaf.name, _samples(leaf))

    def define(self, name: str, branches: int | None = None) -> None:
        self.known.add(name)
        self.own.add(name)
        self.joined.pop(name, None)
        if branches is not None:
            self.joined[name] = branches

    def role(self, name: str, expr: Any = None) -> Block:
        if is_symbolic(name):
            raise Untraceable("the name of a role is symbolic")
        if expr is not None:
            self.__iadd__(role_expr(name, expr))
            return Block(self)
        return Block(self, RoleBegin(name), RoleEnd(name))

    def system(self, expr: Any = None) -> Block:
        return self.role("system", expr)

    def user(self, expr: Any = None) -> Block:
        return self.role("user", expr)

    def assistant(self, expr: Any = None) -> Block:
        return self.role("assistant", expr)

    def var_scope(self, name: str) -> Block:
        if is_symbolic(name):
            raise Untraceable("the name of a variable is symbolic")
        return Block(self, ScopeBegin(name), ScopeEnd(name))

    def run(self, program: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(getattr(program, "body", None), types.FunctionType):
            raise Untraceable(f"runs {program!r:.60} on this state, which is no program of a def")
        if program.is_async and not self.record.is_async:
            raise Untraceable(f"runs {program.name!r}, which is an 'async def', in a plain program")
        options = {
            k: v
            for k, v in kwargs.items()
            if k in RUN_OPTION_NAMES and k not in program._signature.parameters
        }
        if is_symbolic(options):
            raise Untraceable("an option of a program that runs on this state is symbolic")
        arguments, _ = program._split(args, kwargs)
        view = copy.copy(self)
        view.calls = (*self.calls, Call(program.name, program._options, options))
        return self.record.follow(program.body)(view, *arguments.args, **arguments.kwargs)

    def set(self, name: str, value: Any) -> None:
        if is_symbolic(name) or not isinstance(name, str) or not name:
            raise Untraceable("the name of a variable is symbolic, or no name")
        if any(isinstance(each, (TraceState, TraceGroup)) for each in parts(value)):
            raise Untraceable("sets a variable to a state")
        self.record.add(self, Set(name, frozen(value)))
        self.define(name)

    __setitem__ = set_var = set

    def __getitem__(self, name: Key) -> Any:
        return self._read(name, "value")

    def get(self, name: Key, type: Any = Any) -> Any:
        value = self[name]
        return value if type is Any else applied(checked, (value, type, str(name)), {})

    get_var = get

    def text(self, name: Key | None = None) -> Any:
        return self._reading(None, "whole") if name is None else self._read(name, "text")

    def meta(self, name: Key) -> Any:
        return self._read(name, "meta")

    def messages(self) -> Reading:
        return self._reading(None, "messages")

    def _read(self, name: Key, what: str) -> Symbol | list[Symbol]:
        """A symbol, or a list of them for what was joined of a known number of branches, or has so many samples."""
        if is_symbolic(name):
            raise Untraceable("the name of a variable, or what was appended, is symbolic")
        if isinstance(name, (Gen, Select)):
            if id(name) not in self.leaves:
                raise Untraceable("reads a gen or select that was not appended to this state by then")
        elif name not in self.known:
            raise Untraceable(f"reads the variable {name!r}, which is not set by then")
        branches = self.joined.get(name) if isinstance(name, str) else _samples(name)
        reading = self._reading(name, what, branches)
        return reading if branches is None else [item(reading, i) for i in range(branches)]

    def _reading(self, key: Key | None, what: str, branches: int | None = None) -> Reading:
        reading = Reading(self.record.readings, self.number, key, what, branches)
        self.record.readings += 1
        self.record.add(self, Read(reading))
        return reading

    def sync(self) -> None:
        self.record.add(self, Sync())

    def fork(self, n: int = 1) -> TraceGroup:
        if is_symbolic(n):
            raise Untraceable("the number of branches is symbolic")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise Untraceable(f"fork.n must be an integer of at least 1, got {n!r}")
        if self.record.states + n > MOST_NODES:
            raise Untraceable(f"the program has more than {MOST_NODES:,} branches")
        first = self.record.states
        self.record.states += n
        numbers = tuple(range(first, first + n))
        self.record.add(self, Fork(numbers))
        children = [TraceState(self.record, number, frozenset(self.known)) for number in numbers]
        for child in children:
            child.leaves, child.joined = dict(self.leaves), dict(self.joined)
        return TraceGroup(self, children)

    def copy(self) -> TraceState:
        return self.fork(1).states[0]


class TraceGroup:
    """Takes the place of a ProgramStateGroup."""

    FOLLOWED = frozenset({"join"})

    def __init__(self, parent: TraceState, states: list[TraceState]) -> None:
        self.parent = parent
        self.states = states
        self.call: Callable[..., Any] = lambda function, *args: function(*args)

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: Any) -> Any:
        return self.states[index]

    def __setitem__(self, index: int, state: TraceState) -> None:
        if self.states[index] is not state:
            raise Untraceable("replaces a branch")

    def __iter__(self) -> Iterator[TraceState]:
        return iter(self.states)

    def __iadd__(self, what: Any) -> TraceGroup:
        if isinstance(what, (list, tuple)):
            if len(what) != len(self.states):
                raise Untraceable(f"appends a list of {len(what)} to {len(self.states)} branches")
            exprs = list(what)
        elif isinstance(what, Symbol) and not is_text(what):
            raise Untraceable("appends a symbolic value, which may be a list or a function, to all branches")
        elif is_symbolic(what) or not callable(what):
            exprs = [what] * len(self.states)
        else:
            exprs = [self.call(what, index) for index in range(len(self.states))]
        for state, expr in zip(self.states, exprs, strict=True):
            state += expr
        return self

    def join(self, mode: str = "gather", on_error: str = "raise") -> TraceState:
        if mode not in ("gather", "concatenate") or on_error not in ("raise", "return"):
            raise Untraceable(f"joins with mode {mode!r} and on_error {on_error!r}")
        numbers = tuple(state.number for state in self.states)
        self.parent.record.add(self.parent, Join(numbers, mode, on_error))
        if mode == "gather":
            for name in sorted(set().union(*(state.own for state in self.states))):
                self.parent.define(name, len(self.states))
        return self.parent

    def __enter__(self) -> TraceGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.join()


def _samples(leaf: Expr) -> int | None:
    """How many, of a gen with several."""
    return leaf.n if isinstance(leaf, Gen) and leaf.n > 1 else None


def parts(value: Any) -> Iterator[Any]:
    """A value and, if it is a list, tuple or dict, all in it."""
    yield value
    if isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from parts(each)
