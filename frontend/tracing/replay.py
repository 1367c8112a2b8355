"""Runs a straight-line program from its graph, without its Python body.

The order of one state's nodes is kept: the text before a gen is its prompt. Between states only what is read, forks
and joins order anything. So the gens of several branches are sent together, also where the body would have waited for
one branch before it came to the next.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from trellis.errors import ProgramError
from trellis.frontend.expressions import as_expr
from trellis.frontend.feed import Feed
from trellis.frontend.group import ProgramStateGroup
from trellis.frontend.program import Program
from trellis.frontend.state import ProgramState
from trellis.frontend.subprogram import call_on
from trellis.frontend.tracing.graph import Append, Fork, Join, Node, Read, Set, Sync, Trace
from trellis.frontend.tracing.state import TraceState
from trellis.frontend.tracing.symbols import Deferred, Reading, Symbol, evaluate, symbols_of
from trellis.frontend.variable import Variable

Blocker = tuple[Feed, Callable[[], bool]]
"""What must be waited for, and the condition that ends the wait."""


class Player:
    """One run of a graph."""

    def __init__(self, trace: Trace, state: ProgramState, arguments: Mapping[str, Any]) -> None:
        self._trace = trace
        self._arguments = arguments
        self._states = {0: state}
        self._groups: dict[tuple[int, ...], ProgramStateGroup] = {}
        self._variables: dict[int, Variable] = {}  # by slot
        self._whole: dict[int, Any] = {}  # by slot
        self._values: dict[int, Any] = {}  # by slot
        self._views: dict[tuple[int, ...], ProgramState] = {}  # by state and calls
        self._readers: dict[int, list[int]] = {}  # slot → states that wait for the reading to be reached
        self._nodes = _queues(trace)
        self._left = sum(map(len, self._nodes.values()))
        self._joining: dict[int, bool] = {}  # joins that wait, by node: whether the wait is over
        self._woken: queue.SimpleQueue[int] = queue.SimpleQueue()

    def play(self) -> Any:
        """Run all nodes, and return what the body would have returned."""
        ready = deque([0])
        while self._left:
            self._advance(ready.popleft() if ready else self._woken.get(), ready)
        for node in self._trace.nodes:
            if isinstance(node.what, Read):  # also of what is not used: reading raises what there is to raise
                self.reading(node.what.reading)
        return self._result(self._trace.result)

    # -- values ------------------------------------------------------------------------------------------------

    def argument(self, name: str) -> Any:
        return self._arguments[name]

    def reading(self, reading: Reading) -> Any:
        """Waits if it must. ProgramError if the state has failed or the text is no value."""
        if reading.of_state:
            return self._whole[reading.slot]
        if reading.slot not in self._values:
            state, variable = self._states[reading.state], self._variables[reading.slot]
            executor = state._executor
            variable.feed.wait(lambda: variable.done or executor.failure is not None)
            state._raise_failure()
            if reading.what == "value" and variable.problem is not None:
                raise variable.problem.error()
            self._values[reading.slot] = getattr(variable, reading.what)
        return self._values[reading.slot]

    def _result(self, value: Any) -> Any:
        if isinstance(value, TraceState):
            return self._states[value.number]
        if type(value) in (list, tuple):
            return type(value)(self._result(each) for each in value)
        if type(value) is dict:
            return {key: self._result(each) for key, each in value.items()}
        return evaluate(value, self)

    # -- order -------------------------------------------------------------------------------------------------

    def _advance(self, state: int, ready: deque[int]) -> None:
        """Run a state's nodes until one has to wait."""
        nodes = self._nodes[state]
        while nodes and state in self._states:
            node = nodes[0]
            if isinstance(node.what, Join) and state != node.state:
                if self._nodes[node.state][0] is node:
                    ready.append(node.state)
                return  # the parent joins
            if not self._may_run(node, state):
                return
            nodes.popleft()
            self._left -= 1
            ready.extend(self._run(node))

    def _may_run(self, node: Node, state: int) -> bool:
        what = node.what
        if isinstance(what, Join):
            return self._may_join(node, what)
        if isinstance(what, Sync) or (isinstance(what, Read) and what.reading.of_state):
            blockers = [self._idle(state)]
        else:
            value = what.expr if isinstance(what, Append) else what.value if isinstance(what, Set) else None
            needed = [each for each in symbols_of(value) if isinstance(each, Reading)]
            for reading in needed:
                if reading.slot not in self._variables and reading.slot not in self._whole:
                    self._readers.setdefault(reading.slot, []).append(state)
                    return False
            blockers = [self._arrival(reading) for reading in needed if not reading.of_state]
        return not any(self._parked(blocker, state) for blocker in blockers)

    def _parked(self, blocker: Blocker, state: int) -> bool:
        """Whether it has to wait for this; the state is then woken when it is over."""
        feed, over = blocker
        return not feed.notify(over, lambda: self._woken.put(state))

    def _idle(self, state: int) -> Blocker:
        executor = self._states[state]._executor
        return executor.feed, lambda: executor.idle

    def _may_join(self, node: Node, join: Join) -> bool:
        """Once all branches have said what stands before the join, and are done with it (or one has failed)."""
        if any(self._nodes[child][0] is not node for child in join.children):
            return False
        if node.number not in self._joining:
            self._joining[node.number] = False

            def over() -> None:
                self._joining[node.number] = True
                self._woken.put(node.state)

            self._groups[join.children]._watch(over, join.on_error == "raise")
        return self._joining[node.number]

    def _arrival(self, reading: Reading) -> Blocker:
        variable, executor = self._variables[reading.slot], self._states[reading.state]._executor
        return variable.feed, lambda: variable.done or executor.failure is not None

    # -- nodes -------------------------------------------------------------------------------------------------

    def _run(self, node: Node) -> list[int]:
        """Run one node that need not wait. Returns the states that may go on because of it."""
        state, what = self._view(node), node.what
        if isinstance(what, Append):
            expr = what.expr
            state += as_expr(evaluate(expr, self)) if isinstance(expr, (Symbol, Deferred)) else expr
        elif isinstance(what, Set):
            state.set(what.name, evaluate(what.value, self))
        elif isinstance(what, Read):
            return self._read(state, what.reading)
        elif isinstance(what, Fork):
            group = self._groups[what.children] = state.fork(len(what.children))
            self._states.update(zip(what.children, group, strict=True))
            return list(what.children)
        elif isinstance(what, Join):
            self._groups[what.children].join(what.mode, what.on_error)
            for child in what.children:
                self._nodes[child].popleft()
                self._left -= 1
            return list(what.children)
        else:
            state.sync()
        return []

    def _view(self, node: Node) -> ProgramState:
        """The node's state, with the options that the programs on it give to their gens."""
        key = (node.state, *map(id, node.calls))
        if key not in self._views:
            view = self._states[node.state]
            for call in node.calls:
                # What is asked of a program here is its options; arguments and body are in the nodes.
                view = call_on(view, Program(_nothing, None, call.defaults), (), call.options).state
            self._views[key] = view
        return self._views[key]

    def _read(self, state: ProgramState, reading: Reading) -> list[int]:
        if reading.key is None:
            self._whole[reading.slot] = state.messages() if reading.what == "messages" else state.text()
        else:
            variable = self._variables[reading.slot] = state._lookup(reading.key)
            if reading.branches not in (None, len(variable.feeds)) and variable.kind != "join":
                # The graph has a list of known length; an argument that was appended put something else in its place.
                reason = f"an argument sets {reading.name!r}, which in the program is a list; run it without compiling"
                raise ProgramError(self._trace.program, reading.name, reason)
        return self._readers.pop(reading.slot, [])


def _nothing(_state: ProgramState) -> None:
    """The body of a program that says nothing."""


def _queues(trace: Trace) -> dict[int, deque[Node]]:
    """The nodes of each state. A join stands in the queue of every state that it concerns."""
    queues: dict[int, deque[Node]] = {0: deque()}
    for node in trace.nodes:
        queues.setdefault(node.state, deque()).append(node)
        if isinstance(node.what, Fork):
            queues.update((child, deque()) for child in node.what.children)
        elif isinstance(node.what, Join):
            for child in node.what.children:
                queues[child].append(node)
    return queues
