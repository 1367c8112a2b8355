"""From the text of a JSON schema to one that masks enforce fully, and the check of a finished text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trellis.errors import ConstraintError
from trellis.fsm.json_schema.document import Document
from trellis.fsm.json_schema.emit import emit
from trellis.fsm.json_schema.errors import Unenforceable
from trellis.fsm.json_schema.lower import lower
from trellis.fsm.json_schema.normalise import normalise
from trellis.fsm.json_schema.source import read_schema
from trellis.fsm.json_schema.validation import text_check
from trellis.fsm.limits import Limits


@dataclass(frozen=True)
class Prepared:
    """A JSON schema, ready to be compiled.

    schema: JSON schema 2020-12 with the same instances, written with keywords that llguidance enforces.
    validated_only: what it leaves open (only if not strict), as ``keyword at pointer``; such a text must pass
        ``validate``. warnings: what the user should know, one sentence each.
    """

    schema: dict[str, Any] | bool
    validated_only: list[str]
    warnings: list[str]
    _check: Callable[[str], str | None] = field(repr=False)

    def validate(self, text: str) -> str | None:
        """What is wrong with a finished text by the schema as the user wrote it; None if nothing is."""
        return self._check(text)


def prepare(source: str, strict: bool = True, limits: Limits | None = None) -> Prepared:
    """source: JSON text of a schema of draft 4, 6, 7, 2019-09 or 2020-12 (its ``$schema`` says which).

    Raises ConstraintError: ``syntax`` (no valid schema), ``unsupported`` (a keyword cannot be enforced; only
    if strict), ``limit`` (too large) or ``empty`` (no finite value satisfies it).
    """
    limits = limits or Limits()
    document = Document(read_schema(source, limits), limits)
    try:
        normal = normalise(document, strict, limits)
        lowered = lower(normal, strict, limits)
    except Unenforceable as refusal:
        raise refusal.refusal() from None
    except RecursionError:
        raise ConstraintError("schema", "limit", "", "its schemas lead too deep into each other") from None
    unchecked = [
        f"{refusal.refusal().detail}; nor is it checked (at {refusal.where})" for refusal in normal.dropped
    ]
    return Prepared(
        emit(lowered.root, lowered.definitions),
        list(dict.fromkeys(f"{refusal.keyword} at {refusal.where}" for refusal in lowered.dropped)),
        list(dict.fromkeys([*normal.warnings, *lowered.warnings, *unchecked])),
        text_check(normal.root, normal.definitions),
    )
