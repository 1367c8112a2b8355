"""Docstrings as Markdown for the reference: lines that explain fields, ``name: what it is``, become a list.

MkDocs loads this file as an extension of griffe, which reads the docstrings.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# ``top_p, top_k (-1 is off), min_p: cut the tail`` at the beginning of a line.
NAME = r"[a-z_*][\w*.]*(?: \([^)]*\))?"
FIELD = re.compile(rf"({NAME}(?:(?:, | and ){NAME})*): (\S.*)")


def as_markdown(docstring: str) -> str:
    """A field's text goes on in lines that are indented, or at the margin up to a blank line or a new sentence."""
    lines: list[str] = []
    in_list, before = False, ""
    for line in docstring.splitlines():
        field = FIELD.fullmatch(line)
        starts = in_list or not before.strip() or before.rstrip()[-1] in ".:)"
        if field and starts:
            lines += [] if in_list else [""]
            lines.append(f"- *{field[1]}*: {field[2]}")
            in_list = True
        elif in_list and line.strip():
            in_list = line.startswith(" ") or not line[0].isupper()
            lines += [f"    {line.strip()}"] if in_list else ["", line]
        else:
            lines.append(re.sub(r" ::$", "", line).replace("::", ":") if line.endswith("::") else line)
            in_list = False
        before = line
    return "\n".join(lines)


class Fields(griffe.Extension):
    """Rewrites every docstring once it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
