"""The rewrite of patterns with anchors where an engine wants none."""

from __future__ import annotations

from trellis.fsm.json_schema.errors import Unenforceable
from trellis.fsm.json_schema.normalise import Schema
from trellis.fsm.json_schema.pattern_nfa import has_inner_anchors
from trellis.fsm.json_schema.regular import TooHard
from trellis.fsm.json_schema.scene import Scene

NOTHING = r"^[^\x00-\U0010ffff]\Z"  # found in no text


def pattern(scene: Scene) -> list[Schema]:
    """``pattern``: written anew if an anchor stands elsewhere than at the ends of an alternative."""
    scene.schema["pattern"] = without_inner_anchors(scene.schema["pattern"], scene, "pattern")
    return []


def without_inner_anchors(text: str, scene: Scene, keyword: str) -> str:
    """The same pattern; Unenforceable if it is too large to be written anew."""
    if not has_inner_anchors(text):
        return text
    try:
        return scene.relations.algebra.difference([text], []) or NOTHING
    except TooHard:
        reason = "the pattern has anchors inside, and is too large to be written without them"
        raise Unenforceable(keyword, scene.at, reason) from None
