"""Native code that recurses as deep as a client's grammar goes needs a stack of that depth.

A stack that overflows in native code ends the process; a thread's usual stack (8 MB) holds a few hundred
definitions that each lead to the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from trellis.errors import TrellisError

T = TypeVar("T")

_STACK_BYTES = 512 << 20  # of address space; only what is used becomes memory
_one_at_a_time = threading.Lock()  # the stack size of new threads is a setting of the process


def with_deep_stack(work: Callable[[], T]) -> T:
    """``work()`` in a thread of its own with a large stack; waits for it. Raises what it raises."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    with _one_at_a_time:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="deep-stack")
            thread.start()
        except RuntimeError as error:
            raise TrellisError(f"no memory for a stack of {_STACK_BYTES >> 20} MB: {error}") from error
        finally:
            threading.stack_size(usual)
    thread.join()
    return outcome.result()
