"""Constraints: regex and choices to token masks and forced runs."""

from trellis.fsm.compiler import GrammarCompiler
from trellis.fsm.contract import ConstraintKind, ConstraintSpec, Grammar, MaskRow, Matcher, Vocabulary
from trellis.fsm.limits import Limits
from trellis.fsm.registry import Engine, backend_names, compile_grammar

__all__ = [
    "ConstraintKind",
    "ConstraintSpec",
    "Engine",
    "Grammar",
    "GrammarCompiler",
    "Limits",
    "MaskRow",
    "Matcher",
    "Vocabulary",
    "backend_names",
    "compile_grammar",
]
