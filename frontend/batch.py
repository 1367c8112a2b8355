"""Many runs of one program at the same time."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from trellis.errors import InvalidRequestError
from trellis.frontend.state import ProgramState

BatchItem = Mapping[str, Any] | Sequence[Any]


def run_items(
    program: str,
    states: Sequence[ProgramState],
    jobs: Sequence[Callable[[], None]],
    num_threads: int | str,
    progress_bar: bool,
    on_error: str,
) -> None:
    """Run each job in a bounded pool of threads and wait for all. jobs[i] drives states[i]."""
    if on_error not in ("raise", "return"):
        raise InvalidRequestError("run_batch.on_error", f"must be 'raise' or 'return', got {on_error!r}")
    workers = _workers(num_threads)
    if not jobs:
        return
    pool = ThreadPoolExecutor(min(workers, len(jobs)), thread_name_prefix=f"trellis-{program}")
    futures: list[Future[None]] = []
    try:
        # Each body sees the caller's context variables, in a copy of its own.
        for job in jobs:
            futures.append(pool.submit(contextvars.copy_context().run, job))
        with _bar(program, len(jobs), progress_bar) as advance:
            for future in as_completed(futures):
                advance()
                if on_error == "raise":
                    future.result()
    except BaseException:
        _cancel(states, futures)
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _cancel(states: Sequence[ProgramState], futures: Sequence[Future[None]]) -> None:
    for future in futures:
        future.cancel()
    for state in states:
        state.cancel("its batch was ended by an error")


def _workers(num_threads: int | str) -> int:
    if num_threads == "auto":
        return max(96, 16 * (os.cpu_count() or 1))
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1:
        raise InvalidRequestError(
            "run_batch.num_threads", f"must be 'auto' or at least 1, got {num_threads!r}"
        )
    return num_threads


@contextlib.contextmanager
def _bar(program: str, total: int, shown: bool) -> Any:
    """Yields a function that is called once an item is done."""
    if not shown:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=program) as bar:
        yield lambda: bar.update(1)
