"""The rewrites, in the order in which they are tried at a schema."""

from __future__ import annotations

from collections.abc import Callable

from trellis.fsm.json_schema.anchors import pattern
from trellis.fsm.json_schema.arrays import contains, unique_items
from trellis.fsm.json_schema.conditions import (
    complement,
    conditional,
    dependent_required,
    dependent_schemas,
    exactly_one,
)
from trellis.fsm.json_schema.names import count_properties, pattern_properties, property_names
from trellis.fsm.json_schema.normalise import Schema
from trellis.fsm.json_schema.numbers import bound, constants, multiple
from trellis.fsm.json_schema.scene import Scene
from trellis.fsm.json_schema.unevaluated import unevaluated_items, unevaluated_properties

__all__ = ["REWRITES", "Scene"]


def _forget(keyword: str) -> Callable[[Scene], list[Schema]]:
    """For what another rewrite has read already."""

    def rewrite(scene: Scene) -> list[Schema]:
        del scene.schema[keyword]
        return []

    return rewrite


# A rewrite takes its keyword out of the scene and returns schemas that hold in its place; it raises
# Unenforceable where there are none.
REWRITES: tuple[tuple[str, Callable[[Scene], list[Schema]]], ...] = (
    ("pattern", pattern),
    ("enum", constants),
    *((keyword, bound) for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")),
    ("multipleOf", multiple),
    ("unevaluatedProperties", unevaluated_properties),
    ("unevaluatedItems", unevaluated_items),
    ("if", conditional),
    ("then", _forget("then")),
    ("else", _forget("else")),
    ("dependentRequired", dependent_required),
    ("dependentSchemas", dependent_schemas),
    ("not", complement),
    ("oneOf", exactly_one),
    ("propertyNames", property_names),
    ("patternProperties", pattern_properties),
    ("minProperties", count_properties),
    ("maxProperties", count_properties),
    ("contains", contains),
    ("minContains", _forget("minContains")),
    ("maxContains", _forget("maxContains")),
    ("uniqueItems", unique_items),
)
