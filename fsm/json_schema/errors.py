"""What lowering raises inside the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trellis.errors import ConstraintError


class Unenforceable(Exception):
    """A keyword that no rewrite turns into something that masks can enforce.

    keyword: its name. where: JSON pointer of the schema that holds it. reason: why not, and what would help.
    weaker: schemas that can be enforced instead; they follow from the keyword.
    """

    def __init__(self, keyword: str, where: str, reason: str, weaker: Sequence[Any] = ()) -> None:
        super().__init__(keyword, where, reason)
        self.keyword = keyword
        self.where = where
        self.reason = reason
        self.weaker = weaker

    def refusal(self) -> ConstraintError:
        reason = f"keyword {self.keyword!r} cannot be enforced: {self.reason}"
        return ConstraintError("schema", "unsupported", self.where, reason)


def malformed(where: str, reason: str) -> ConstraintError:
    """The schema itself is wrong."""
    return ConstraintError("schema", "syntax", where, reason)
