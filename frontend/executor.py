"""Runs what is appended to one state, in order, as a coroutine on the loop thread.

Appending never waits: it registers the variables, queues the expressions, and the loop thread works them off.
A state that has nothing to do holds no task and no thread. A failure ends the state at once, from whichever
thread it comes: what is queued is dropped, what is running is cancelled, and everyone who waits is woken.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trellis.errors import ProgramError, RequestAborted
from trellis.frontend.answering import answer
from trellis.frontend.expressions import Expr, Gen, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Select, Text
from trellis.frontend.failure import Failure
from trellis.frontend.feed import Feed
from trellis.frontend.log import log_failed
from trellis.frontend.loop import cancel_task
from trellis.frontend.media import Media
from trellis.frontend.parameters import RunOptions
from trellis.frontend.run import Run
from trellis.frontend.spans import Span
from trellis.frontend.transcript import Transcript
from trellis.frontend.variable import Variable

if TYPE_CHECKING:
    import asyncio


@dataclass(frozen=True)
class Branch:
    """The point of a fork: the children start from the transcript as it is here."""

    children: tuple[Executor, ...]


@dataclass(frozen=True)
class Splice:
    """Append what another transcript said after a point (see ``Transcript.splice``)."""

    source: Transcript
    pieces: int
    messages: int


Step = tuple[Expr | Branch | Splice, Variable | None]


class Executor:
    """One state's queue. ``submit``, ``fork``, ``fail`` and the waits may be called from any thread but the loop's;
    the transcript changes only on the loop thread, so it may be read once the executor is idle."""

    def __init__(self, run: Run, parent: Executor | None = None) -> None:
        self.run = run
        self._parent = parent  # kept alive: the run finds a fork of a fork through the fork
        self.lane: tuple[int, ...] = ()
        self._forked = 0
        self.feed = Feed()
        self.transcript = Transcript()
        self.forked_at = (0, 0)  # pieces and messages that came from the parent
        self.variables: dict[str, Variable] = dict(parent.variables) if parent else {}
        self.appended: dict[int, tuple[Expr, Variable]] = dict(parent.appended) if parent else {}
        self.records: list[Variable] = []
        self.failure: Failure | None = None
        self.open_role: str | None = parent.open_role if parent else None
        self._open_scopes: list[Variable] = []  # begun by what was appended
        self._scopes: list[Variable] = []  # begun by what was run
        self._steps: deque[Step] = deque()
        self._busy = parent is not None  # a child's queue waits until its parent has reached the fork
        self._current: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._children: list[weakref.ref[Executor]] = []
        self._lock = threading.Lock()

    # -- appending ---------------------------------------------------------------------------------------------

    def submit(self, leaves: Sequence[Expr], options: RunOptions | None = None) -> None:
        """Queue expressions. ProgramError if the state has failed or the roles do not pair up.

        options: of their gens, where they are others than the run's.
        """
        with self._lock:
            self._check_alive()
            self.open_role = self._role_after(leaves)
            self._steps.extend((leaf, self._register(leaf, options)) for leaf in leaves)
            self._kick()
        self.feed.wake()

    def fork(self, n: int) -> list[Executor]:
        """n children that start from this point; does not wait for it to be reached."""
        with self._lock:
            self._check_alive()
            children = [Executor(self.run, self) for _ in range(n)]
            for child in children:
                child.lane, self._forked = (*self.lane, self._forked), self._forked + 1
            self._children = [ref for ref in self._children if ref() is not None]
            self._children.extend(weakref.ref(child) for child in children)
            self._steps.append((Branch(tuple(children)), None))
            self._kick()
        return children

    def splice(self, child: Executor) -> None:
        """Queue what an idle child said after its fork."""
        with self._lock:
            self._check_alive()
            if child.open_role != self.open_role:
                raise ProgramError(
                    self.run.program,
                    None,
                    f"cannot concatenate a branch that has role {child.open_role!r} open "
                    f"to a state that has {self.open_role!r} open; begin and end roles on the same side of the fork",
                )
            self._steps.append((Splice(child.transcript.copy(), *child.forked_at), None))
            self._kick()

    def define(self, variable: Variable) -> None:
        """Set a variable that already has its value."""
        with self._lock:
            self._check_alive()
            self._add(variable)
        self.feed.wake()

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise self.failure.error()

    def _register(self, leaf: Expr, options: RunOptions | None) -> Variable | None:
        if isinstance(leaf, ScopeEnd):
            scope = self._open_scopes.pop()
            scope.is_open = False
            return scope
        if isinstance(leaf, ScopeBegin):
            scope = self._add(Variable(leaf.name, "scope", is_open=True))
            self._open_scopes.append(scope)
            return scope
        if not isinstance(leaf, (Gen, Select)):
            return None
        kind, n = ("gen", leaf.n) if isinstance(leaf, Gen) else ("select", 1)
        span = Span(leaf.name, kind, self.lane)
        self.run.spans.append(span)
        feeds = tuple(Feed() for _ in range(n - 1))
        variable = self._add(Variable(leaf.name, kind, options=options, more_feeds=feeds, span=span))
        self.appended[id(leaf)] = (leaf, variable)
        return variable

    def _add(self, variable: Variable) -> Variable:
        self.records.append(variable)
        if variable.name is not None:
            self.variables[variable.name] = variable
        return variable

    def _role_after(self, leaves: Sequence[Expr]) -> str | None:
        role = self.open_role
        for leaf in leaves:
            if isinstance(leaf, RoleBegin):
                if role is not None:
                    reason = f"roles cannot be nested: {leaf.role!r} begins while {role!r} is open"
                    raise ProgramError(self.run.program, None, reason)
                role = leaf.role
            elif isinstance(leaf, RoleEnd):
                if role != leaf.role:
                    reason = f"role {leaf.role!r} ends, but {f'{role!r} is' if role else 'no role is'} open"
                    raise ProgramError(self.run.program, None, reason)
                role = None
        return role

    def _kick(self) -> None:
        if not self._busy:
            self._busy = True
            if self.run.loop.is_here():
                self._task = self.run.loop.spawn(self._drain())
            else:
                self.run.loop.post(self._start)

    @property
    def is_root(self) -> bool:
        return self._parent is None

    # -- ending ------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing is queued or running (a failed executor is idle)."""
        return not self._busy

    def fail(self, cause: BaseException, variable: str | None = None, by_body: bool = False) -> None:
        """End the state and its forks. The first failure stays.

        variable: that failed; the one that is under way if not given. by_body: the program's body raised it, so that
        no variable did.
        """
        failure = Failure.of(self.run.program, variable or (None if by_body else self._current), cause)
        if self._end(failure):
            log_failed(failure)
            left = self.children()  # not by recursion: a fork may stand in a fork as deep as a program likes
            while left:
                child = left.pop()
                if child._end(failure):
                    left += child.children()

    def _end(self, failure: Failure) -> bool:
        """Stop this state alone. False if it has failed before."""
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = failure
            self._steps.clear()
            self._busy = False
            task, self._task = self._task, None
            waited_on = [*self.variables.values(), *self.records]
            spans = [record.span for record in self.records if record.span is not None]
        for span in spans:
            span.fail()
        if task is not None:
            cancel_task(task)
        self.feed.wake()
        for one in waited_on:
            one.wake()
        return True

    def children(self) -> list[Executor]:
        with self._lock:
            found = [ref() for ref in self._children]
        return [child for child in found if child is not None]

    def family(self) -> Iterator[Executor]:
        """This executor and all that were forked from it."""
        left = [self]
        while left:
            executor = left.pop()
            yield executor
            left += reversed(executor.children())

    # -- waiting -----------------------------------------------------------------------------------------------

    def wait(self, inside: bool) -> None:
        """Block until all that will be said has been said (see ``ended``). ProgramError if the state has failed."""
        self.feed.wait(lambda: self.ended(inside))
        self._check_alive()

    def wait_family(self) -> None:
        """Block until this executor and its forks are idle. ProgramError if this one has failed."""
        for executor in list(self.family()):
            executor.feed.wait(lambda executor=executor: executor.idle)  # type: ignore[misc]
        self._check_alive()

    def ended(self, inside: bool) -> bool:
        """Nothing is under way, and nothing can be appended before the reader goes on.

        inside: the reader is the program's body, which appends nothing while it waits; for any other reader the
        body must have ended too.
        """
        return not self._busy and (inside or self.run.body_done or self.failure is not None)

    def variable_of(self, key: str | Expr) -> Variable | None:
        """By its name, or the very expression that was appended here (the last time, if more than once)."""
        if isinstance(key, str):
            return self.variables.get(key)
        found = self.appended.get(id(key))
        return found[1] if found is not None else None

    def known(self, name: str | Expr, inside: bool) -> bool:
        """Whether it is decided that the variable exists, or never will."""
        return self.variable_of(name) is not None or inside or self.ended(inside)

    # -- on the loop thread ------------------------------------------------------------------------------------

    def adopt(self, parent: Transcript) -> None:
        """Start a child from its parent's transcript."""
        self.transcript = parent
        self.forked_at = (len(parent.pieces), len(parent.messages))
        if self.failure is None:
            if parent.pieces:
                self.feed.append(parent.text())
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self.failure is None:
                self._task = self.run.loop.spawn(self._drain())

    def _next(self) -> Step | None:
        with self._lock:
            if self._steps:
                return self._steps.popleft()
            self._busy = False
            self._task = None
        self.feed.wake()
        return None

    async def _drain(self) -> None:
        from asyncio import CancelledError

        try:
            while (step := self._next()) is not None:
                expr, variable = step
                self._current = variable.name if variable else None
                await self._execute(expr, variable)
            self._current = None
        except CancelledError:
            self._task = None
            self.fail(RequestAborted("the event loop was closed"))
        except BaseException as error:  # SystemExit too: raised on, it would end the loop of all states
            self._task = None
            self.fail(error)

    async def _execute(self, expr: Expr | Branch | Splice, variable: Variable | None) -> None:
        if isinstance(expr, Text):
            self.say(self.transcript.write(expr.text))
        elif isinstance(expr, (Gen, Select)):
            assert variable is not None
            await answer(self, expr, variable)
        elif isinstance(expr, RoleBegin):
            self.say(self.transcript.begin_role(expr.role, await self.run.chat_format()))
        elif isinstance(expr, RoleEnd):
            self.say(self.transcript.end_role())
        elif isinstance(expr, ScopeBegin):
            assert variable is not None
            self._scopes.append(variable)
        elif isinstance(expr, ScopeEnd):
            assert variable is not None
            self._scopes.remove(variable)
            variable.resolve(variable.feed.text, variable.feed.text, None)
        elif isinstance(expr, Media):
            raise expr.refused_by(await self.run.backend.model_info())
        elif isinstance(expr, Branch):
            self.say(self.transcript.before_fork())
            for child in expr.children:
                child.adopt(self.transcript.copy())
        elif isinstance(expr, Splice):
            chat = await self.run.chat_format() if expr.source.messages[expr.messages :] else None
            self.say(self.transcript.splice(expr.source, expr.pieces, expr.messages, chat))
        else:
            raise TypeError(f"cannot run a {type(expr).__name__}")

    def say(self, text: str) -> None:
        if text:
            for scope in self._scopes:
                scope.feed.append(text)
            self.feed.append(text)

    def show(self, text: str, variable: Variable, sample: int = 0) -> None:
        """Text of a variable; that of further samples is no part of what the state says."""
        if text:
            variable.feeds[sample].append(text)
            if sample == 0:
                self.say(text)
