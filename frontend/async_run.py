"""How programs run for asynchronous code, and how the body of an ``async def`` program runs anywhere.

The body is a task: of the caller's event loop (``run_async``), or of the loop of all states (``run``). The requests
that it makes always belong to the loop of all states.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from trellis.errors import RequestAborted
from trellis.frontend.async_state import AsyncProgramState
from trellis.frontend.loop import LoopThread
from trellis.frontend.state import ProgramState

if TYPE_CHECKING:
    from trellis.frontend.executor import Executor

AsyncBody = Callable[[AsyncProgramState], Awaitable[Any]]
"""The body of a program with all its arguments but the state."""
Work = Callable[[], Coroutine[Any, Any, None]]
T = TypeVar("T")
_CANCELLED = "the task that ran the program was cancelled"


async def drive(root: Executor, body: AsyncBody) -> None:
    """Run the body as a task of the running loop and wait for everything that it started.

    Raises what the body raises, unchanged; ProgramError when a backend, a timeout or ``cancel`` ended the program.
    Cancelling it aborts the requests under way.
    """
    if root.failure is not None:
        raise root.failure.error()
    run = root.run
    state = AsyncProgramState(ProgramState(run, root, inside=True))
    task = asyncio.ensure_future(_outcome(body(state)))
    run.stop_body = functools.partial(_stop, asyncio.get_running_loop(), task)
    timer = run.start_timer(root)
    try:
        await asyncio.wait((task,))
        run.return_value = _result(root, task)
        run.end_body(root)
        await family_idle(root)
    except asyncio.CancelledError:
        root.fail(RequestAborted(_CANCELLED))
        task.cancel()
        await asyncio.wait((task,))
        raise
    finally:
        run.stop_body = None
        run.end_body(root)
        if timer is not None:
            timer.cancel()


async def family_idle(root: Executor) -> None:
    """Wait until this executor and its forks are idle. ProgramError if this one has failed."""
    for executor in list(root.family()):
        await executor.feed.wait_async(lambda executor=executor: executor.idle)  # type: ignore[misc]
    if root.failure is not None:
        raise root.failure.error()


async def _outcome(work: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """(result, None) or (None, error). A task that raises SystemExit or KeyboardInterrupt would end its loop."""
    try:
        return await work, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


def _result(root: Executor, task: asyncio.Task[tuple[Any, BaseException | None]]) -> Any:
    """What the body returned. Raises what it raised, and fails the state with that."""
    if task.cancelled():
        root.fail(RequestAborted("the body of the program was cancelled"))
        assert root.failure is not None
        raise root.failure.error()
    value, error = task.result()
    if error is not None:
        root.fail(error, by_body=True)
        raise error
    return value


def _stop(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    """Cancel the body, from any thread; not when the body itself asks, which goes on to its next read."""
    if asyncio._get_running_loop() is not loop:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the body with it
            loop.call_soon_threadsafe(task.cancel)
    elif asyncio.current_task() is not task:
        task.cancel()


def start(loop: LoopThread, work: Work) -> None:
    """Run it in the loop of all states, without waiting; what it raises is in the state."""
    loop.call(_outcome(work()))


def block_on(loop: LoopThread, work: Work) -> None:
    """Run it in the loop of all states, and wait; an interruption (Ctrl-C) cancels it. RuntimeError on that loop's
    own thread."""
    _, error = loop.result(lambda: _outcome(work()))
    if error is not None:
        raise error


async def in_thread(executor: Executor, job: Callable[[], T]) -> T:
    """Run the body of a plain program in a thread of its own, with the caller's context variables.

    Cancelling it ends the state, and does not wait: the thread ends at the body's next read.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result((value, error))

    def work() -> None:
        value, error = None, None
        try:
            value = job()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, value, error)

    context = contextvars.copy_context()
    name = f"trellis-{executor.run.program}"
    threading.Thread(target=context.run, args=(work,), name=name, daemon=True).start()
    try:
        value, error = await ended
    except asyncio.CancelledError:
        executor.run.end(executor, RequestAborted(_CANCELLED))
        raise
    if error is not None:
        raise error
    result: T = value
    return result


def start_here(root: Executor, work: Coroutine[Any, Any, None]) -> AsyncProgramState:
    """Run it as a task of the running loop, without waiting. Returns the state to be read while it runs."""
    root.run.driver = asyncio.ensure_future(_outcome(work))
    return AsyncProgramState(ProgramState(root.run, root, inside=False))
