"""Programs of either kind that run inside an async one: on its state, or each on a branch of it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trellis.errors import RequestAborted
from trellis.frontend.async_run import family_idle, in_thread
from trellis.frontend.async_state import AsyncProgramState
from trellis.frontend.subprogram import Call, Gathering, call_on

if TYPE_CHECKING:
    from trellis.frontend.program import Program


async def run_on(
    state: AsyncProgramState, program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """``await state.run``."""
    return await _result(call_on(state._state, program, args, kwargs))


async def _result(call: Call) -> Any:
    if call.program.is_async:
        return await call(AsyncProgramState(call.state))
    return await in_thread(call.state._executor, functools.partial(call, call.state))


async def gather_on(
    state: AsyncProgramState, programs: Mapping[str, Program], on_error: str
) -> dict[str, Any]:
    """``await state.gather``: each body in a task."""
    gathering = Gathering(state._state, programs, on_error)
    tasks: list[asyncio.Task[None]] = []

    async def work(index: int) -> None:
        call = gathering.calls[index]
        try:
            result = await _result(call)
            await family_idle(call.state._executor)
        except asyncio.CancelledError:
            gathering.failed(index, RequestAborted("the program that gathers it was ended"))
        except BaseException as error:
            gathering.failed(index, error)
            if on_error == "raise":
                for other in tasks:
                    if other is not asyncio.current_task():
                        other.cancel()
        else:
            gathering.ended(index, result)

    tasks += [asyncio.ensure_future(work(index)) for index in range(len(gathering.calls))]
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        gathering.cancel("the program that gathers it was ended")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise
    return gathering.results()
