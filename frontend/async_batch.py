"""Many runs of one program at the same time, as tasks of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from trellis.errors import RequestAborted
from trellis.frontend.batch import BatchOptions, end_all
from trellis.frontend.progress import progress
from trellis.frontend.state import ProgramState

AT_ONCE = 1024
"""Bodies at work at the same time, unless said otherwise. They cost no thread, but a place in the server's queue."""

AsyncJob = Callable[[], Awaitable[None]]


async def run_items_async(
    program: str, states: Sequence[ProgramState], jobs: Sequence[AsyncJob], options: BatchOptions
) -> None:
    """Run each job in a bounded number of tasks and wait for all. jobs[i] drives states[i]."""
    if not jobs:
        return
    batch = _Batch(states, jobs, options.on_error == "raise")
    count = min(options.at_once or AT_ONCE, len(jobs))
    timer = options.start_timer(states)
    with progress(program, states, options.progress_bar) as advance:
        workers = [asyncio.ensure_future(batch.work(advance)) for _ in range(count)]
        try:
            await asyncio.wait(workers)
        except asyncio.CancelledError:
            end_all(states, RequestAborted("the task that ran the batch was cancelled"))
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)
            raise
        finally:
            if timer is not None:
                timer.cancel()
    if batch.error is not None:
        raise batch.error


class _Batch:
    """What the workers share: the jobs that are left, and the error that ended the batch."""

    def __init__(self, states: Sequence[ProgramState], jobs: Sequence[AsyncJob], stop_at_error: bool) -> None:
        self._states = states
        self._left: Iterator[AsyncJob] = iter(jobs)
        self._stop_at_error = stop_at_error
        self.error: BaseException | None = None

    async def work(self, advance: Callable[[], object]) -> None:
        for job in self._left:
            try:
                await job()
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                self._failed(error)
            if self.error is not None:
                return
            advance()

    def _failed(self, error: BaseException) -> None:
        if self._stop_at_error and self.error is None:
            self.error = error
            end_all(self._states, RequestAborted("its batch was ended by an error"))
