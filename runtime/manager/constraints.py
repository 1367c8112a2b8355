"""Constraints as clients write them → ``Constraint``. What a pattern, schema or grammar means is checked when it
is compiled; here it is only seen to be one constraint, and text or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from trellis.errors import InvalidRequestError
from trellis.fsm.contract import ConstraintKind, Spacing
from trellis.runtime.manager.fields import Fields, check_text, kind_of
from trellis.runtime.messages import Constraint

KINDS: tuple[str, ...] = get_args(ConstraintKind)
SPACINGS: tuple[str, ...] = get_args(Spacing)


def check_constraint(constraint: Constraint | None) -> Constraint | None:
    """Raises InvalidRequestError for an unknown kind or for text that has no UTF-8 form."""
    if constraint is not None:
        if constraint.kind not in KINDS:
            known = ", ".join(KINDS)
            raise InvalidRequestError(constraint.kind, f"unknown kind of constraint; known: {known}")
        if constraint.spacing not in SPACINGS:
            raise InvalidRequestError("json_spacing", f"must be one of {', '.join(SPACINGS)}")
        check_text(constraint.source, constraint.kind)
    return constraint


def read_constraint(fields: Fields, response_format: Any = None) -> Constraint | None:
    """``regex``, ``choices``, ``json_schema`` or ``grammar``; at most one. ``json_spacing`` and ``strict`` go with
    a schema.

    response_format: OpenAI's way to ask for JSON, which is another name for a schema.
    """
    sources = {
        "regex": _text(fields, "regex"),
        "choices": _choices(fields),
        "json_schema": _schema(fields, "json_schema"),
        "grammar": _text(fields, "grammar"),
    }
    strict = None
    if response_format is not None:
        sources["response_format"], strict = _response_format(fields, response_format)
    given = [name for name, source in sources.items() if source is not None]
    if len(given) > 1:
        raise fields.error(given[1], f"{given[0]} is set too; a request has at most one constraint")
    source = sources[given[0]] if given else None
    if source is not None and given[0] in ("json_schema", "response_format"):
        return Constraint("schema", source, _spacing(fields), fields.boolean("strict", strict is not False))
    for option in ("json_spacing", "strict"):
        if fields.get(option) is not None:
            raise fields.error(option, "only for a request with a JSON schema")
    return Constraint(given[0], source) if source is not None else None


def _spacing(fields: Fields) -> str:
    spacing = fields.string("json_spacing", SPACINGS[0])
    if spacing not in SPACINGS:
        raise fields.error("json_spacing", f"must be one of {', '.join(SPACINGS)}, not {spacing!r}")
    return spacing


def _text(fields: Fields, name: str) -> str | None:
    text = fields.string(name)
    if text == "":
        raise fields.error(name, "must not be empty; leave it out for no constraint")
    return text


def _choices(fields: Fields) -> str | None:
    if fields.get("choices") is None:
        return None
    choices = [
        fields.check_string(each, f"choices[{i}]") for i, each in enumerate(fields.elements("choices"))
    ]
    if not choices:
        raise fields.error("choices", "must have at least one option; leave it out for no constraint")
    return json.dumps(choices, ensure_ascii=False)


def _schema(fields: Fields, name: str) -> str | None:
    """A schema as an object, true or false, or as the JSON text of one."""
    raw = fields.get(name)
    if raw is None:
        return None
    if isinstance(raw, str):
        if not raw.strip():
            raise fields.error(name, "must not be empty; leave it out for no constraint")
        return fields.check_string(raw, name)
    if not isinstance(raw, (Mapping, bool)):
        raise fields.error(name, f"must be a JSON schema: an object, or its text, not {kind_of(raw)}")
    try:
        return fields.check_string(json.dumps(raw, ensure_ascii=False), name)
    except RecursionError:
        raise fields.error(name, "is nested too deeply") from None


def _response_format(fields: Fields, raw: Any) -> tuple[str | None, bool | None]:
    """(the schema's text, strict if it is said)."""
    form = Fields(raw, fields.name("response_format"))
    kind = form.string("type")
    source: str | None = None
    strict: bool | None = None
    if kind == "json_object":
        source = '{"type": "object"}'
    elif kind == "json_schema":
        inner = Fields(form.get("json_schema"), form.name("json_schema"))
        source = _schema(inner, "schema")
        if source is None:
            raise inner.error("schema", "is missing")
        if inner.get("strict") is not None:
            strict = inner.boolean("strict")
        inner.string("name")
        inner.string("description")
        inner.done()
    elif kind != "text":
        raise form.error("type", f"must be text, json_object or json_schema, not {kind!r}")
    form.done()
    return source, strict
