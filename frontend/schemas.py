"""What a program may give as a schema, and the values that texts of that schema become."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from trellis.errors import ConstraintError, InvalidRequestError

Reader = Callable[[str], Any]


def read_schema(schema: Any) -> tuple[str, Reader]:
    """The JSON schema's text, and text → value.

    schema: a JSON schema as a dict, a bool or JSON text; its values are what ``json.loads`` gives. Or a Python
        type that pydantic knows (a model, a dataclass, a TypedDict, an Enum, a Literal, ``int``, ``list[str]``,
        ``str | None`` ...); its values are of that type.

    Raises InvalidRequestError when it is none of these, ConstraintError for text that is not JSON.
    """
    if isinstance(schema, str):
        return _checked_text(schema), json.loads
    if isinstance(schema, (Mapping, bool)):
        try:
            return json.dumps(schema, ensure_ascii=False, allow_nan=False), json.loads
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError("gen.schema", f"is not JSON: {error}") from error
    return read_type(schema, "gen.schema")


def _checked_text(text: str) -> str:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConstraintError(
            "schema", "syntax", f"position {error.pos}", f"not JSON: {error.msg}"
        ) from error
    except RecursionError as error:
        raise ConstraintError("schema", "limit", "", "is nested too deeply") from error
    if not isinstance(parsed, (dict, bool)):
        raise ConstraintError(
            "schema", "syntax", "", f"must be a JSON object, true or false, not {text.strip():.60}"
        )
    return text


def read_type(python_type: Any, where: str) -> tuple[str, Reader]:
    """``read_schema`` of a Python type. where: the argument's name, for messages."""
    from pydantic import PydanticUserError, TypeAdapter
    from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

    wrong = (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, PydanticUserError)
    if not _is_type(python_type):
        shown = f"{python_type!r:.100}"
        wanted = "a JSON schema or a Python type" if where == "gen.schema" else "a Python type"
        raise InvalidRequestError(where, f"must be {wanted}, got {shown}")
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(python_type)
        schema = adapter.json_schema()
    except (*wrong, NameError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidRequestError(
            where, f"no JSON schema can be made of {python_type!r:.100}: {reason}"
        ) from error
    return json.dumps(_closed(schema), ensure_ascii=False), adapter.validate_json


def _is_type(value: Any) -> bool:
    """Classes, and what typing makes of them; not the values of those."""
    return isinstance(value, type) or type(value).__module__ in ("typing", "types", "typing_extensions")


def _closed(schema: Any) -> Any:
    """The schema with no other properties in its objects than the declared ones: a Python type has no place for
    them. Objects that say themselves what else they may hold stay as they are."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed_part(name, part) for name, part in schema.items()}
    if closed.get("type") == "object" and isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _closed_part(keyword: str, part: Any) -> Any:
    if keyword in ("default", "const", "enum", "examples"):
        return part  # values, even where they look like schemas
    if keyword in ("properties", "patternProperties", "$defs") and isinstance(part, dict):
        return {name: _closed(schema) for name, schema in part.items()}
    return _closed(part)
