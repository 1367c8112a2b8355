"""What a trace found: the nodes of a program, in the order in which it said them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trellis.frontend.expressions import Expr, Gen, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Select, Text
from trellis.frontend.parameters import RunOptions
from trellis.frontend.tracing.stop import Stop
from trellis.frontend.tracing.symbols import Deferred, Reading, Symbol, shown

_LONGEST = 200  # characters of a text that ``str`` shows


@dataclass(frozen=True, eq=False)
class Append:
    """An expression is appended: Text, Gen, Select, RoleBegin, RoleEnd, or one with symbolic parts."""

    expr: Expr


@dataclass(frozen=True)
class Fork:
    """children: numbers of the new states."""

    children: tuple[int, ...]


@dataclass(frozen=True)
class Join:
    children: tuple[int, ...]
    mode: str
    on_error: str


@dataclass(frozen=True, eq=False)
class Set:
    name: str
    value: Any


@dataclass(frozen=True, eq=False)
class Read:
    reading: Reading


@dataclass(frozen=True)
class Sync:
    """The program waits until everything that was appended has run."""


What: TypeAlias = Append | Fork | Join | Set | Read | Sync


@dataclass(frozen=True, eq=False)
class Call:
    """``s.run(program, **options)``, as far as it matters for gens: what the program's options and the call say."""

    program: str
    defaults: RunOptions
    options: Mapping[str, Any]


@dataclass(frozen=True, eq=False, repr=False)
class Node:
    """number: its place in the order of the program. state: 0 is the program's own, others come from forks.
    line: of the program's source. calls: the programs that run on this state (``s.run``), the outer one first."""

    number: int
    state: int
    line: int | None
    what: What
    calls: tuple[Call, ...] = ()

    def __repr__(self) -> str:
        return f"<Node {self.number} of state {self.state}: {described(self.what)}>"


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """program: its name. arguments: names of the symbolic arguments. fixed: those that had a value.
    stop: why the trace ended before the program did; None for a straight-line program. result: what the body
    returned."""

    program: str
    arguments: tuple[str, ...]
    fixed: Mapping[str, Any]
    nodes: tuple[Node, ...]
    stop: Stop | None
    result: Any = field(default=None)

    @property
    def is_straight(self) -> bool:
        """The whole program is in the graph, whatever its arguments are and whatever the model writes."""
        return self.stop is None

    def of_state(self, state: int) -> Iterator[Node]:
        """The nodes of one state, in order."""
        return (node for node in self.nodes if node.state == state)

    def __repr__(self) -> str:
        return f"<Trace of program {self.program!r}: {len(self.nodes)} nodes, {self.stop or 'straight-line'}>"

    def __str__(self) -> str:
        depth = {0: 0}
        fixed = [f"{name}={shown(repr(value))}" for name, value in self.fixed.items()]
        lines = [f"{self.program}({', '.join([*self.arguments, *fixed])})"]
        for node in self.nodes:
            if isinstance(node.what, Fork):
                depth.update(dict.fromkeys(node.what.children, depth[node.state] + 1))
            label = f"state {node.state}: " if node.state else ""
            label += "".join(f"{call.program}: " for call in node.calls)
            lines.append("  " * (depth[node.state] + 1) + label + described(node.what))
        if self.stop is not None:
            lines.append(f"  straight up to here: {self.stop}")
        return "\n".join(lines)


def described(what: What) -> str:
    """A node in a few words, on one line."""
    if isinstance(what, Append):
        return described_expr(what.expr)
    if isinstance(what, Fork):
        return f"fork → {', '.join(f'state {child}' for child in what.children)}"
    if isinstance(what, Join):
        how = "" if what.mode == "gather" else f" {what.mode}"
        return f"join{how} ← {', '.join(f'state {child}' for child in what.children)}"
    if isinstance(what, Set):
        return f"set {what.name} = {shown(what.value)!r}"
    if isinstance(what, Read):
        return f"read {what.reading.shown()[1:-1]}"
    return "wait"


def described_expr(expr: Expr) -> str:
    if isinstance(expr, Text):
        return f"text {_cut(expr.text)!r}"
    if isinstance(expr, Gen):
        options = [f"{name.replace('_new_tokens', '_tokens')}={value!r}" for name, value in expr.sampling]
        if expr.constraint is not None:
            options.append(f"{expr.constraint.kind}={expr.constraint.source!r}")
        return " ".join(["gen", expr.name or "(unnamed)", *options])
    if isinstance(expr, Select):
        return f"select {expr.name or '(unnamed)'} of {', '.join(map(repr, expr.choices))}"
    if isinstance(expr, RoleBegin):
        return f"begin {expr.role}"
    if isinstance(expr, RoleEnd):
        return f"end {expr.role}"
    if isinstance(expr, ScopeBegin):
        return f"begin of variable {expr.name}"
    if isinstance(expr, ScopeEnd):
        return f"end of variable {expr.name}"
    if isinstance(expr, Deferred):
        return expr.shown()
    if isinstance(expr, Symbol):
        return f"text {_cut(expr.shown())!r}"
    return type(expr).__name__


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
