"""Which of the two dialects a ``grammar`` constraint is written in."""

from __future__ import annotations

import re

from trellis.errors import ConstraintError
from trellis.fsm.contract import ConstraintSpec

_COMMENTS = r"\A(?:\s|(?:#|//)[^\n]*(?:\n|\Z))*"
# The first thing that is not a comment: ``root ::=`` in GBNF; ``start:``, ``?rule:``, ``%import`` in Lark.
_GBNF = re.compile(_COMMENTS + r"[A-Za-z_][A-Za-z0-9_-]*\s*::=")
_LARK = re.compile(_COMMENTS + r"(?:%[a-z]+\b|[?!]{0,2}[A-Za-z_][^:\n]*:(?!:=))")


def engine_kind(spec: ConstraintSpec) -> str:
    """What an engine must know to compile this: the kind, or ``ebnf`` for a grammar in GBNF.

    Raises ConstraintError ``syntax`` for a grammar in neither dialect.
    """
    if spec.kind != "grammar":
        return spec.kind
    if _GBNF.match(spec.source):
        return "ebnf"
    if _LARK.match(spec.source):
        return "grammar"
    reason = 'neither a Lark grammar, as in  start: "yes" | "no",  nor GBNF, as in  root ::= "yes" | "no"'
    raise ConstraintError("grammar", "syntax", "", reason)
