"""Where the nodes of a graph stand in its picture: a column a state, a row a step of the longest way to a node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trellis.frontend.expressions import Gen, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Select
from trellis.frontend.tracing.graph import Append, Fork, Join, Node, Read, Set, Trace, described
from trellis.frontend.tracing.symbols import Deferred, Reading, symbols_of


@dataclass(frozen=True)
class Box:
    """kind: ``text`` | ``model`` | ``role`` | ``order`` | ``stop``. line: of the program's source."""

    number: int
    label: str
    kind: str
    row: int
    column: int
    line: int | None


@dataclass(frozen=True)
class Arrow:
    """reads: the target uses a variable that the source sets; otherwise it comes after the source."""

    source: int
    target: int
    reads: bool


@dataclass(frozen=True)
class Layout:
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def layout(trace: Trace) -> Layout:
    """Time and space are linear in the nodes and the states that forks and joins name."""
    arrows = list(_arrows(trace))
    sources: dict[int, list[int]] = {}
    for arrow in arrows:
        sources.setdefault(arrow.target, []).append(arrow.source)
    rows: dict[int, int] = {}
    boxes = []
    for number, label, kind, column, line in _items(trace):
        rows[number] = 1 + max((rows[source] for source in sources.get(number, ())), default=-1)
        boxes.append(Box(number, label, kind, rows[number], column, line))
    return Layout(tuple(boxes), tuple(arrows))


def _items(trace: Trace) -> Iterator[tuple[int, str, str, int, int | None]]:
    """Number, label, kind, column and line of each box."""
    for node in trace.nodes:
        if not isinstance(node.what, Read):
            yield node.number, described(node.what), _kind(node), node.state, node.line
    if trace.stop is not None:
        yield len(trace.nodes), f"straight up to here: {trace.stop}", "stop", 0, None


def _kind(node: Node) -> str:
    if not isinstance(node.what, Append):
        return "order"
    if isinstance(node.what.expr, (Gen, Select, Deferred)):
        return "model"
    return "role" if isinstance(node.what.expr, (RoleBegin, RoleEnd, ScopeBegin, ScopeEnd)) else "text"


def _arrows(trace: Trace) -> Iterator[Arrow]:
    """From earlier nodes to later ones; what is read is an arrow from what set it."""
    last: dict[int, int] = {}
    setters: dict[int, dict[str, int]] = {0: {}}  # state → variable → node
    read: dict[int, int | None] = {}  # slot → node that set it
    for node in trace.nodes:
        what = node.what
        if isinstance(what, Read):
            read[what.reading.slot] = setters[node.state].get(what.reading.name, last.get(node.state))
            continue
        before = [node.state, *(what.children if isinstance(what, Join) else ())]
        yield from (Arrow(last[state], node.number, False) for state in before if state in last)
        for source in dict.fromkeys(read[each.slot] for each in _readings(node)):
            if source is not None:
                yield Arrow(source, node.number, True)
        last[node.state] = node.number
        _set(node, setters)
        if isinstance(what, Fork):
            for child in what.children:
                last[child] = node.number
                setters[child] = dict(setters[node.state])
    if trace.stop is not None and 0 in last:
        yield Arrow(last[0], len(trace.nodes), False)


def _readings(node: Node) -> list[Reading]:
    what = node.what
    value = what.expr if isinstance(what, Append) else what.value if isinstance(what, Set) else None
    return [each for each in symbols_of(value) if isinstance(each, Reading)]


def _set(node: Node, setters: dict[int, dict[str, int]]) -> None:
    """Note which variables the node sets."""
    what, own = node.what, setters[node.state]
    if isinstance(what, Set):
        own[what.name] = node.number
    elif isinstance(what, Append) and isinstance(what.expr, (Gen, Select, Deferred, ScopeEnd)):
        if what.expr.name is not None:
            own[what.expr.name] = node.number
    elif isinstance(what, Join) and what.mode == "gather":
        for child in what.children:
            changed = [name for name, number in setters[child].items() if own.get(name) != number]
            own.update(dict.fromkeys(changed, node.number))
