"""The rewrite of patterns with anchors where an engine wants none."""

from __future__ import annotations

import re

from trellis.fsm.json_schema.normalise import Schema
from trellis.fsm.json_schema.regular import TooHard
from trellis.fsm.json_schema.scene import Scene

NOTHING = r"^[^\x00-\U0010ffff]\Z"  # found in no text
# A pattern as a row of atoms: classes, escapes, single characters.
_ATOM = re.compile(r"\[(?:\\.|[^\]\\])*\]|\\.|.", re.DOTALL)


def pattern(scene: Scene) -> list[Schema]:
    """``pattern``: written anew if an anchor stands elsewhere than at the ends of an alternative."""
    scene.schema["pattern"] = without_inner_anchors(scene.schema["pattern"], scene)
    return []


def without_inner_anchors(text: str, scene: Scene) -> str:
    """The same pattern, as it is if it is too large to be written anew: then the engine decides."""
    if not _inner_anchors(text):
        return text
    try:
        return scene.relations.algebra.difference([text], []) or NOTHING
    except TooHard:
        return text


def _inner_anchors(text: str) -> bool:
    atoms = _ATOM.findall(text)
    for i, atom in enumerate(atoms):
        before, after = atoms[i - 1] if i else "|", atoms[i + 1] if i + 1 < len(atoms) else "|"
        if (atom == "^" and before not in "|:") or (atom == r"\Z" and after not in "|)"):
            return True
    return False
