"""Many runs of one program at the same time."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

from trellis.errors import InvalidRequestError, RequestAborted
from trellis.frontend.loop import Timer, forbid_blocking
from trellis.frontend.parameters import check_timeout
from trellis.frontend.progress import progress
from trellis.frontend.state import ProgramState

BatchItem = Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class BatchOptions:
    """at_once: bodies at work at the same time; None: as many as is good. on_error: ``raise`` | ``return``.
    timeout: seconds for all of the batch."""

    at_once: int | None
    progress_bar: bool
    on_error: str
    timeout: float | None

    @staticmethod
    def checked(
        num_threads: int | str, progress_bar: bool, on_error: str, batch_timeout: float | None
    ) -> BatchOptions:
        """InvalidRequestError for a wrong one."""
        if on_error not in ("raise", "return"):
            raise InvalidRequestError("run_batch.on_error", f"must be 'raise' or 'return', got {on_error!r}")
        number = isinstance(num_threads, int) and not isinstance(num_threads, bool) and num_threads >= 1
        if num_threads != "auto" and not number:
            raise InvalidRequestError(
                "run_batch.num_threads", f"must be 'auto' or at least 1, got {num_threads!r}"
            )
        at_once = num_threads if isinstance(num_threads, int) else None
        timeout = check_timeout("run_batch", batch_timeout, "batch_timeout")
        return BatchOptions(at_once, progress_bar, on_error, timeout)

    def of_threads(self) -> BatchOptions:
        """With the bound that bodies in threads have."""
        return replace(self, at_once=self.at_once or max(96, 16 * (os.cpu_count() or 1)))

    def start_timer(self, states: Sequence[ProgramState]) -> Timer | None:
        """Ends what is not done when the time of the batch is over."""
        if self.timeout is None or not states:
            return None
        late = TimeoutError(f"the batch was not done within its timeout of {self.timeout:g} s")
        return states[0]._run.loop.after(self.timeout, lambda: end_all(states, late))


def run_items(
    program: str, states: Sequence[ProgramState], jobs: Sequence[Callable[[], None]], options: BatchOptions
) -> None:
    """Run each job in a bounded pool of threads and wait for all. jobs[i] drives states[i]."""
    if not jobs:
        return
    forbid_blocking()
    workers = min(options.of_threads().at_once or 1, len(jobs))
    pool = ThreadPoolExecutor(workers, thread_name_prefix=f"trellis-{program}")
    timer = options.start_timer(states)
    futures: list[Future[None]] = []
    try:
        # Each body sees the caller's context variables, in a copy of its own.
        for job in jobs:
            futures.append(pool.submit(contextvars.copy_context().run, job))
        with progress(program, states, options.progress_bar) as advance:
            for future in as_completed(futures):
                advance()
                if options.on_error == "raise":
                    future.result()
    except BaseException:
        for future in futures:
            future.cancel()
        end_all(states, RequestAborted("its batch was ended by an error"))
        raise
    finally:
        if timer is not None:
            timer.cancel()
        pool.shutdown(wait=True, cancel_futures=True)


def end_all(states: Sequence[ProgramState], cause: BaseException) -> None:
    """End every program that is not done."""
    for state in states:
        state._run.end(state._executor, cause)
