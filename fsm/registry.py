"""Which engine compiles which kind of constraint."""

from __future__ import annotations

from typing import Protocol

from trellis.errors import ConstraintError
from trellis.fsm.compressed import CompressedEngine
from trellis.fsm.contract import ConstraintSpec, Grammar, Vocabulary
from trellis.fsm.dialect import engine_kind
from trellis.fsm.limits import Limits
from trellis.fsm.llguidance_engine import LLGuidanceEngine
from trellis.fsm.outlines_engine import OutlinesEngine
from trellis.fsm.xgrammar_engine import XGrammarEngine

AUTO = "auto"


class Engine(Protocol):
    """A way to compile constraints.

    name: what the user picks it by. kinds: what it can compile: constraint kinds, where ``grammar`` is one in
    Lark and ``ebnf`` one in GBNF.
    """

    @property
    def name(self) -> str: ...

    @property
    def kinds(self) -> frozenset[str]: ...

    def compile(self, spec: ConstraintSpec, vocabulary: Vocabulary, limits: Limits) -> Grammar:
        """Raises ConstraintError."""


# In order of preference: ``auto`` takes the first that knows the kind.
ENGINES: tuple[Engine, ...] = (CompressedEngine(), LLGuidanceEngine(), XGrammarEngine(), OutlinesEngine())


def backend_names() -> list[str]:
    """What ``backend`` may be."""
    return [AUTO, *(engine.name for engine in ENGINES)]


def engine_for(kind: str, backend: str = AUTO) -> Engine:
    """The engine for this kind of constraint; ConstraintError ``unsupported`` says which there are."""
    if backend not in backend_names():
        known = ", ".join(backend_names())
        raise ConstraintError(
            kind, "unsupported", "", f"unknown grammar backend {backend!r}; there are: {known}"
        )
    for engine in ENGINES:
        if kind in engine.kinds and backend in (AUTO, engine.name):
            return engine
    what = "a grammar in GBNF" if kind == "ebnf" else repr(kind)
    known = "; ".join(f"{engine.name}: {', '.join(sorted(engine.kinds))}" for engine in ENGINES)
    raise ConstraintError(
        "grammar" if kind == "ebnf" else kind,
        "unsupported",
        "",
        f"no engine for {what} with grammar backend {backend!r}; there are: {known}",
    )


def compile_grammar(
    spec: ConstraintSpec, vocabulary: Vocabulary, backend: str = AUTO, limits: Limits | None = None
) -> Grammar:
    """Compile a constraint for a vocabulary.

    Raises ConstraintError with a code: ``syntax`` (not valid), ``unsupported`` (valid, but cannot be
    enforced), ``limit`` (too large), ``empty`` (nothing can satisfy it), ``timeout``.
    """
    return engine_for(engine_kind(spec), backend).compile(spec, vocabulary, limits or Limits())
