"""The text with which every run of a program begins, whatever its arguments are and whatever the model writes."""

from __future__ import annotations

from typing import Any

from trellis.frontend.backends.base import Segment
from trellis.frontend.executor import Executor
from trellis.frontend.expressions import Expr, RoleBegin, RoleEnd, Text
from trellis.frontend.run import Run
from trellis.frontend.tracing.graph import Append, Join, Trace
from trellis.frontend.tracing.symbols import Formatted, Sum


def constant_prefix(trace: Trace) -> list[Expr]:
    """What the program itself appends, up to the first text that depends on an argument or on the model."""
    found: list[Expr] = []
    for node in trace.of_state(0):
        what = node.what
        if isinstance(what, Join) and what.mode != "gather":
            break
        if not isinstance(what, Append):
            continue
        if not isinstance(what.expr, (Text, RoleBegin, RoleEnd)):
            if text := _leading_text(what.expr):
                found.append(Text(text))
            break
        found.append(what.expr)
    return found


def prefix_prompt(run: Run, prefix: list[Expr]) -> tuple[Segment, ...]:
    """The prefix as the start of a prompt, with the text that the model's chat template adds. Waits for the backend to
    say what its template is; ProgramError if the template has no such role."""
    executor = Executor(run)
    executor.submit(prefix)
    executor.wait(inside=True)
    return executor.transcript.prompt()


def _leading_text(value: Any) -> str:
    """What a symbolic text begins with, whatever its symbols are."""
    if isinstance(value, str):
        return value
    found = ""
    for part in value.parts if isinstance(value, (Sum, Formatted)) else ():
        found += _leading_text(part)
        if not isinstance(part, str):
            break
    return found
