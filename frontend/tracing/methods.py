"""What a program can say about itself without being run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trellis.frontend.backends.base import Backend
    from trellis.frontend.parameters import RunOptions
    from trellis.frontend.tracing.compiled import CompiledProgram
    from trellis.frontend.tracing.drawing import Drawing
    from trellis.frontend.tracing.graph import Trace


TRACE = "_trellis_trace"
"""Attribute of the body of a compiled program: the graph that it runs from."""


class Traceable:
    """The part of ``Program`` that looks at the body: its graph, and what follows from it."""

    name: str
    body: Callable[..., Any]
    _bound: dict[str, Any]
    _options: RunOptions
    _signature: inspect.Signature

    def trace(self, *args: Any, **arguments: Any) -> Trace:
        """The program's graph, found by running its body once without a backend.

        args, arguments: the program's own; those that are not given (or bound) are symbolic. A symbolic value, and
        what the model will write, can be appended, added, formatted, and asked for attributes, items and the methods
        of strings that give strings. The trace ends, and ``trace.stop`` says where and why, at the first place that
        depends on such a value in another way (``if``, ``len``, iteration), and before the first thing that would
        have an effect (output, a change of an object that the program did not make, a call of a function of whose
        source nothing is known). Raises TypeError for arguments that the program does not take, and nothing else.
        """
        from trellis.frontend.tracing.trace import trace_body

        given = self._given(args, arguments)
        found: Trace | None = getattr(self.body, TRACE, None)
        return found or trace_body(self.name, self.body, self._signature, given)

    def compile(self, **arguments: Any) -> CompiledProgram:
        """A program that runs from the graph and no longer calls the body: ``fast = program.compile()``,
        ``fast.run(...)``, ``fast.run_batch(...)``. Its results are the same.

        Gens that do not depend on each other are sent together: those of different branches, also where the body
        would wait for one branch before it goes on with the next. In one state the text before a gen is its prompt,
        so there each gen depends on those before it.

        arguments: values that become part of the program. ProgramError, with the place in the source, if the program
        is not straight-line for all values of the others.
        """
        from trellis.frontend.program import Program
        from trellis.frontend.tracing.compiled import CompiledProgram

        program = Program(self.body, {**self._bound, **arguments}, self._options)
        return CompiledProgram(program.trace(), program._signature, program._options)

    def graph(self, *args: Any, **arguments: Any) -> Drawing:
        """``trace``, as a picture: ``print`` it, or ask it for ``svg()``, ``html()`` or ``dot()``."""
        from trellis.frontend.tracing.drawing import Drawing

        return Drawing(self.trace(*args, **arguments))

    def cache(self, *args: Any, backend: Backend | None = None, **arguments: Any) -> str:
        """Compute the program's constant prefix at the backend, before any run needs it, and return its text.

        The prefix is what every run begins with: the text, roles included, before the first text that depends on an
        argument that is not given here, or on the model. Nothing is sent, and the text is empty, if there is none.
        Raises what the backend raises.
        """
        from trellis.frontend.defaults import DEFAULTS
        from trellis.frontend.run import Run
        from trellis.frontend.tracing.prefix import constant_prefix, prefix_prompt

        run = Run(self.name, DEFAULTS.backend(backend or self._options.backend), self._options, DEFAULTS.loop)
        prompt = prefix_prompt(run, constant_prefix(self.trace(*args, **arguments)))
        if not prompt:
            return ""
        DEFAULTS.loop.result(lambda: run.backend.cache_prefix(prompt))
        return "".join(segment for segment in prompt if isinstance(segment, str))

    def _given(self, args: tuple[Any, ...], arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            given = self._signature.bind_partial(*args, **arguments).arguments
        except TypeError as error:
            raise TypeError(f"program {self.name!r}: {error}") from None
        return {**self._bound, **given}
