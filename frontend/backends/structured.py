"""Constraints as the structured outputs of APIs: JSON of a schema whose root is an object.

What is no object (a list of choices, ``list[int]``) travels as the one property of an object, and is taken out of
it again. A regex or a grammar has no such form, and is refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from trellis.errors import BackendError, ConstraintError
from trellis.frontend.backends.base import Constraint

_KEY = "value"
_OPENING = re.compile(rf'\s*\{{\s*"{_KEY}"\s*:\s*')


@dataclass(frozen=True)
class StructuredOutput:
    """schema: for the API; its root is an object. wrapped: the text is the value of its only property. is_text: that
    value is a string, and the text is what it says. strict: the API enforces all of it.
    """

    schema: dict[str, Any]
    wrapped: bool = False
    is_text: bool = False
    strict: bool = True

    def text(self, answer: str) -> str:
        """The gen's text out of the API's. An answer that was cut gives what is there."""
        opening = _OPENING.match(answer) if self.wrapped else None
        if opening is None:
            return answer
        rest = answer[opening.end() :]
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except ValueError:
            return rest.lstrip('"') if self.is_text else rest
        return value if self.is_text and isinstance(value, str) else rest[:end]


def structured(constraint: Constraint, api: str) -> StructuredOutput:
    """ConstraintError for what structured outputs cannot say."""
    if constraint.kind == "choices":
        enum = {"type": "string", "enum": json.loads(constraint.source)}
        return StructuredOutput(_object(enum), wrapped=True, is_text=True)
    if constraint.kind != "schema":
        raise unsupported(
            constraint, f"{api} cannot enforce a {constraint.kind}; it takes schema= and choices="
        )
    if constraint.spacing != "spaced":
        raise unsupported(constraint, f"{api} sets the blanks of its JSON itself; leave json_spacing out")
    schema = json.loads(constraint.source)
    if not isinstance(schema, dict):
        raise unsupported(constraint, f"{api} needs a schema that says what it takes, not {schema!r}")
    if schema.get("type") == "object" and "anyOf" not in schema:
        return StructuredOutput(schema, strict=constraint.strict)
    if '"$ref": "#"' in json.dumps(schema):
        raise unsupported(constraint, f"{api} needs an object at the root; give the root's own name in $defs")
    definitions = {name: schema.pop(name) for name in ("$defs", "definitions") if name in schema}
    return StructuredOutput({**_object(schema), **definitions}, wrapped=True, strict=constraint.strict)


def unsupported(constraint: Constraint, reason: str) -> ConstraintError:
    return ConstraintError(constraint.kind, "unsupported", "", reason)


def check_choice(constraint: Constraint | None, text: str, finish_reason: str, api: str) -> None:
    """BackendError if a whole answer is none of the choices: the API did not enforce what it took."""
    if constraint is None or constraint.kind != "choices" or finish_reason != "stop":
        return
    if text not in json.loads(constraint.source):
        raise BackendError(
            f"{api}: the answer {text[:100]!r} is none of the choices {constraint.source:.200}"
        )


def _object(value: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {_KEY: value},
        "required": [_KEY],
        "additionalProperties": False,
    }
