"""Runs what is appended to one state, in order, as a coroutine on the loop thread.

Appending never waits: it registers the variables, queues the expressions, and the loop thread works them off.
A state that has nothing to do holds no task and no thread. A failure ends the state at once, from whichever
thread it comes: what is queued is dropped, what is running is cancelled, and everyone who waits is woken.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trellis.errors import BackendError, InvalidRequestError, ProgramError, RequestAborted
from trellis.frontend.backends.base import Chunk, Completion, GenerateRequest
from trellis.frontend.choices import decide
from trellis.frontend.expressions import Expr, Gen, RoleBegin, RoleEnd, Select, Text
from trellis.frontend.failure import Failure
from trellis.frontend.feed import Feed
from trellis.frontend.loop import Timer, cancel_task
from trellis.frontend.run import Run
from trellis.frontend.transcript import Transcript
from trellis.frontend.variable import Meta, SelectMeta, Variable

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
        self.feed = Feed()
        self.transcript = Transcript()
        self.forked_at = (0, 0)  # pieces and messages that came from the parent
        self.variables: dict[str, Variable] = dict(parent.variables) if parent else {}
        self.records: list[Variable] = []
        self.failure: Failure | None = None
        self.open_role: str | None = parent.open_role if parent else None
        self._steps: deque[Step] = deque()
        self._busy = parent is not None  # a child's queue waits until its parent has reached the fork
        self._current: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._children: list[weakref.ref[Executor]] = []
        self._lock = threading.Lock()

    # -- appending ---------------------------------------------------------------------------------------------

    def submit(self, leaves: Sequence[Expr]) -> None:
        """Queue expressions. ProgramError if the state has failed or the roles do not pair up."""
        with self._lock:
            self._check_alive()
            self.open_role = self._role_after(leaves)
            self._steps.extend((leaf, self._register(leaf)) for leaf in leaves)
            self._kick()
        self.feed.wake()

    def fork(self, n: int) -> list[Executor]:
        """n children that start from this point; does not wait for it to be reached."""
        with self._lock:
            self._check_alive()
            children = [Executor(self.run, self) for _ in range(n)]
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

    def _register(self, leaf: Expr) -> Variable | None:
        if not isinstance(leaf, (Gen, Select)):
            return None
        return self._add(Variable(leaf.name, "gen" if isinstance(leaf, Gen) else "select"))

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
            self.run.loop.post(self._start)

    # -- ending ------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing is queued or running (a failed executor is idle)."""
        return not self._busy

    def fail(self, cause: BaseException | Failure, variable: str | None = None) -> None:
        """End the state and its forks. The first failure stays."""
        if not isinstance(cause, Failure):
            cause = Failure.of(self.run.program, variable or self._current, cause)
        with self._lock:
            if self.failure is not None:
                return
            self.failure = cause
            self._steps.clear()
            self._busy = False
            task, self._task = self._task, None
            waited_on = [*self.variables.values(), *self.records]
        if task is not None:
            cancel_task(task)
        self.feed.wake()
        for one in waited_on:
            one.feed.wake()
        for child in self.children():
            child.fail(cause)

    def children(self) -> list[Executor]:
        with self._lock:
            found = [ref() for ref in self._children]
        return [child for child in found if child is not None]

    def family(self) -> Iterator[Executor]:
        """This executor and all that were forked from it."""
        yield self
        for child in self.children():
            yield from child.family()

    # -- waiting -----------------------------------------------------------------------------------------------

    def wait(self, inside: bool) -> None:
        """Block until all that will be said has been said (see ``ended``). ProgramError if the state has failed."""
        self.run.loop.forbid_blocking()
        self.feed.wait(lambda: self.ended(inside))
        self._check_alive()

    def wait_family(self) -> None:
        """Block until this executor and its forks are idle. ProgramError if this one has failed."""
        self.run.loop.forbid_blocking()
        for executor in list(self.family()):
            executor.feed.wait(lambda executor=executor: executor.idle)  # type: ignore[misc]
        self._check_alive()

    def ended(self, inside: bool) -> bool:
        """Nothing is under way, and nothing can be appended before the reader goes on.

        inside: the reader is the program's body, which appends nothing while it waits; for any other reader the
        body must have ended too.
        """
        return not self._busy and (inside or self.run.body_done or self.failure is not None)

    def known(self, name: str, inside: bool) -> bool:
        """Whether it is decided that the variable exists, or never will."""
        return name in self.variables or inside or self.ended(inside)

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
        except Exception as error:
            self._task = None
            self.fail(error)

    async def _execute(self, expr: Expr | Branch | Splice, variable: Variable | None) -> None:
        if isinstance(expr, Text):
            self.transcript.add_text(expr.text, written=True)
            self._say(expr.text)
        elif isinstance(expr, Gen):
            assert variable is not None
            await self._timed(expr, self._generate(expr, variable))
        elif isinstance(expr, Select):
            assert variable is not None
            await self._timed(expr, self._select(expr, variable))
        elif isinstance(expr, RoleBegin):
            self._say(self.transcript.begin_role(expr.role, await self.run.chat_format()))
        elif isinstance(expr, RoleEnd):
            self._say(self.transcript.end_role(await self.run.chat_format()))
        elif isinstance(expr, Branch):
            for child in expr.children:
                child.adopt(self.transcript.copy())
        elif isinstance(expr, Splice):
            self._say(self.transcript.splice(expr.source, expr.pieces, expr.messages))
        else:
            raise TypeError(f"cannot run a {type(expr).__name__}")

    def _say(self, text: str) -> None:
        if text:
            self.feed.append(text)

    async def _timed(self, expr: Gen | Select, work: Awaitable[None]) -> None:
        """Fails the state when the expression's own timeout is over, even if the backend ignores cancellation."""
        timer: Timer | None = None
        if expr.timeout is not None:
            late = TimeoutError(f"no answer within its timeout of {expr.timeout:g} s")
            timer = self.run.loop.after(expr.timeout, lambda: self.fail(late, expr.name))
        try:
            await work
        except InvalidRequestError as error:
            if error.field != "prompt" or self.transcript.pieces:
                raise
            reason = f"{error.reason}; append text before the first {type(expr).__name__.lower()}"
            raise InvalidRequestError("prompt", reason) from None
        finally:
            if timer is not None:
                timer.cancel()

    async def _generate(self, gen: Gen, variable: Variable) -> None:
        request = self._request(gen)
        started = time.perf_counter()
        if self.run.options.stream:
            completion = await self._stream(request, variable)
        else:
            completion = await self.run.backend.generate(request)
        if self.failure is not None:
            return
        self.transcript.add_completion(completion)
        self._show(completion.text[len(variable.feed.text) :], variable)
        value, problem = self._value(gen, completion)
        meta = Meta.of_gen(completion, time.perf_counter() - started)
        variable.resolve(value, completion.text, meta, problem)

    def _value(self, gen: Gen, completion: Completion) -> tuple[Any, Failure | None]:
        """What the text stands for, or why it stands for nothing: not a failure unless the value is asked for."""
        if gen.read is None:
            return completion.text, None
        try:
            return gen.read(completion.text), None
        except Exception as error:  # whatever the validators of a type raise
            if completion.finish_reason == "length":
                why = "was cut at max_tokens (finish_reason 'length'); raise max_tokens"
            elif completion.matched is not None:
                why = f"was cut at the stop {completion.matched!r}"
            else:
                why = f"is not a value of its schema: {error}"
            reason = ValueError(f"the text {why}; state.text() of the variable has it")
            reason.__cause__ = error
            return None, Failure(self.run.program, gen.name, reason)

    def _request(self, gen: Gen) -> GenerateRequest:
        options = self.run.options
        sampling = replace(options.sampling, **dict(gen.sampling))
        if sampling.min_new_tokens > sampling.max_new_tokens:
            reason = f"{sampling.min_new_tokens} is more than max_tokens = {sampling.max_new_tokens}"
            raise InvalidRequestError("gen.min_tokens", reason)
        top = options.top_logprobs_num if gen.top_logprobs_num is None else gen.top_logprobs_num
        logprob = options.return_logprob if gen.return_logprob is None else gen.return_logprob
        heals = options.token_healing if gen.token_healing is None else gen.token_healing
        return GenerateRequest(
            prompt=self.transcript.prompt(),
            sampling=sampling,
            constraint=gen.constraint,
            return_logprob=logprob or top > 0,
            top_logprobs_num=top,
            token_healing=heals and self.transcript.ends_in_written_text,
        )

    async def _stream(self, request: GenerateRequest, variable: Variable) -> Completion:
        async with _closing(self.run.backend.stream(request)) as chunks:
            async for chunk in chunks:
                if self.failure is not None:
                    break
                self._show(chunk.text, variable)
                if chunk.final is not None:
                    if not chunk.final.text.startswith(variable.feed.text):
                        raise BackendError("the streamed pieces do not add up to the final text")
                    return chunk.final
        raise BackendError("the stream ended before the answer was complete")

    def _show(self, text: str, variable: Variable) -> None:
        if text:
            variable.feed.append(text)
            self.feed.append(text)

    async def _select(self, select: Select, variable: Variable) -> None:
        started = time.perf_counter()
        result = await self.run.backend.score(self.transcript.prompt(), select.choices)
        if self.failure is not None:
            return
        if len(result.options) != len(select.choices):
            raise BackendError(
                f"{len(select.choices)} options were sent, {len(result.options)} came back scored"
            )
        decision = decide(select.method, result.options, select.temperature, select.seed)
        chosen = select.choices[decision.index]
        self.transcript.add_text(chosen)
        self._show(chosen, variable)
        seconds = time.perf_counter() - started
        meta = SelectMeta.of_select(select.choices, select.method.name, result, decision, seconds)
        variable.resolve(chosen, chosen, meta)


@contextlib.asynccontextmanager
async def _closing(chunks: AsyncIterator[Chunk]) -> AsyncIterator[AsyncIterator[Chunk]]:
    """Closes the iterator at once when reading stops early, so that the backend aborts the request."""
    try:
        yield chunks
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()
