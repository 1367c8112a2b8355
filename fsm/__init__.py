"""Constraints: regex, choices, JSON schemas and grammars to token masks and forced runs."""

from trellis.fsm.compiler import GrammarCompiler
from trellis.fsm.contract import (
    BeginsInside,
    ChecksText,
    ConstraintKind,
    ConstraintSpec,
    Grammar,
    MaskRow,
    Matcher,
    Spacing,
    Vocabulary,
)
from trellis.fsm.limits import Limits
from trellis.fsm.registry import Engine, backend_names, compile_grammar

__all__ = [
    "BeginsInside",
    "ChecksText",
    "ConstraintKind",
    "ConstraintSpec",
    "Engine",
    "Grammar",
    "GrammarCompiler",
    "Limits",
    "MaskRow",
    "Matcher",
    "Spacing",
    "Vocabulary",
    "backend_names",
    "compile_grammar",
]
