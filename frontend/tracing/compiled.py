"""``program.compile()``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from trellis.errors import ProgramError
from trellis.frontend.parameters import RunOptions
from trellis.frontend.program import Program
from trellis.frontend.state import ProgramState
from trellis.frontend.tracing.graph import Trace
from trellis.frontend.tracing.methods import TRACE
from trellis.frontend.tracing.replay import Player


class CompiledProgram(Program):
    """A straight-line program that runs from its graph, and is used like the program that it was made of.

    Arguments that had a value when it was compiled are part of it, and no longer taken. What the body reads besides
    its arguments (globals, variables of an enclosing function) is as it was then.
    """

    def __init__(self, trace: Trace, signature: inspect.Signature, options: RunOptions) -> None:
        """signature: the parameters of the program that was traced. Raises ProgramError, with the place in the source,
        if the program is not straight-line."""
        if trace.stop is not None:
            reason = f"cannot be compiled, since it is not straight-line. {trace.stop}"
            raise ProgramError(trace.program, None, reason)
        super().__init__(_replay(trace, signature), None, options)


def _replay(trace: Trace, signature: inspect.Signature) -> Callable[..., Any]:
    """What takes the place of the body."""
    state_parameter = inspect.Parameter("state", inspect.Parameter.POSITIONAL_ONLY)
    free = [p for name, p in signature.parameters.items() if name in trace.arguments]
    takes = inspect.Signature([state_parameter, *free])

    def replay(state: ProgramState, /, *args: Any, **kwargs: Any) -> Any:
        bound = takes.bind(state, *args, **kwargs)
        bound.apply_defaults()
        return Player(trace, state, bound.arguments).play()

    replay.__name__ = trace.program
    setattr(replay, TRACE, trace)
    replay.__signature__ = takes  # type: ignore[attr-defined]
    return replay
