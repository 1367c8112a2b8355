"""The progress bar of a batch: how many programs are done, and what the model is doing for them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from trellis.frontend.spans import total

if TYPE_CHECKING:
    from trellis.frontend.state import ProgramState

_INTERVAL = 0.2  # seconds between two looks at all states


@contextlib.contextmanager
def progress(program: str, states: Sequence[ProgramState], shown: bool) -> Iterator[Callable[[], object]]:
    """Yields a function that is called once an item is done. Bars of notebooks are drawn by the notebook."""
    if not shown:
        yield lambda: None
        return
    from tqdm.auto import tqdm

    started = time.perf_counter()
    looked = started - _INTERVAL

    with tqdm(total=len(states), desc=program) as bar:

        def advance() -> None:
            nonlocal looked
            now = time.perf_counter()
            if now - looked >= _INTERVAL or bar.n + 1 >= len(states):
                looked = now
                bar.set_postfix_str(summary(states, now - started), refresh=False)
            bar.update(1)

        yield advance


def summary(states: Sequence[ProgramState], seconds: float) -> str:
    """``1,204 tok/s, 45% cached, 2 failed`` of the gens and selects that are done."""
    counts = total(
        span.counts for state in states for span in list(state._run.spans) if span.done is not None
    )
    failed = sum(state._executor.failure is not None for state in states)
    speed = counts.completion_tokens / seconds if seconds > 0 else 0.0
    parts = [f"{speed:,.0f} tok/s"]
    if counts.prompt_tokens:
        parts.append(f"{counts.cached_tokens / counts.prompt_tokens:.0%} cached")
    if failed:
        parts.append(f"{failed} failed")
    return ", ".join(parts)
