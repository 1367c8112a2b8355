"""Pictures of the radix tree that need nothing but themselves: an SVG, and a page of HTML without scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from itertools import count

from trellis.cache_tree import Line, Tree, ago, title

ROW, INDENT, DEEPEST, BAR, WIDTH = 20, 14, 30, 120, 1100  # pixels; DEEPEST in levels
_LOCKED = "#c2410c"
_AGES = (
    (10, "#0f766e"),
    (60, "#0d9488"),
    (600, "#5eada5"),
    (math.inf, "#9ca3af"),
)  # idle seconds below, colour
_LEGEND = "bar: tokens, logarithmic · orange: in use · green: used just now · grey: long idle"

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em; color: #111827; background: #fff }
details { margin-left: 1.1em; border-left: 1px solid #e5e7eb; padding-left: .4em }
details details details details details details details details details details { margin-left: .3em }
summary { cursor: pointer; white-space: nowrap } summary.leaf { list-style: none; cursor: default; padding-left: 1em }
code { background: #f3f4f6; padding: 0 .3em } i { display: inline-block; height: .7em; margin-right: .5em }
small, .more { color: #6b7280 }
"""


def colour(line: Line) -> str:
    """Of a node in use, else by the time since its last use."""
    return _LOCKED if line.locks else next(shade for limit, shade in _AGES if line.idle_s < limit)


def bar(line: Line) -> int:
    """Pixels for the tokens of an edge: 1 token 4, 10 tokens 24, 100,000 tokens all."""
    return min(BAR, 4 + round(20 * math.log10(max(1, line.length))))


def svg(tree: Tree) -> str:
    """A row a node, indented by its depth in the tree."""
    rows = list(_svg_rows(tree))
    height = ROW * (len(rows) + 3)
    body = "\n".join(rows)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" \
viewBox="0 0 {WIDTH} {height}" xml:space="preserve" font-family="ui-monospace, monospace" font-size="12">
<rect width="100%" height="100%" fill="#fff"/>
<text x="10" y="{ROW}" font-weight="bold">{escape(tree.heading)}</text>
<text x="10" y="{2 * ROW}" fill="#6b7280">{escape(_LEGEND)}</text>
{body}
</svg>
"""


def _svg_rows(tree: Tree) -> Iterator[str]:
    heights = count(3 * ROW, ROW)
    for namespace, tops in tree.namespaces.items():
        yield _svg_text(10, next(heights), title(namespace), "#111827", "bold")
        for level, line in _walk(tops):
            x, y = 10 + INDENT * min(level, DEEPEST), next(heights)
            if isinstance(line, int):
                yield _svg_text(x, y, f"… {line:,} more", "#6b7280")
                continue
            length = bar(line)
            box = f'<rect x="{x}" y="{y - 9}" width="{length}" height="10" rx="2" fill="{colour(line)}"/>'
            yield box + _svg_text(x + length + 6, y, line.quoted, "#111827", note=line.facts)
    if tree.left_out:
        text = f"{tree.left_out:,} nodes of the cache are not shown"
        yield _svg_text(10, next(heights), text, "#6b7280")


def _svg_text(x: int, y: int, text: str, fill: str, weight: str = "normal", note: str = "") -> str:
    tail = f' <tspan fill="#6b7280">{escape(note)}</tspan>' if note else ""
    return f'<text x="{x}" y="{y}" fill="{fill}" font-weight="{weight}">{escape(text)}{tail}</text>'


def html(tree: Tree) -> str:
    """Branches open and close by themselves; every node says all about itself when pointed at."""
    parts = []
    for namespace, tops in tree.namespaces.items():
        parts.append(f"<h3>{escape(title(namespace))}</h3>")
        parts.extend(_html_rows(tops))
    if tree.left_out:
        parts.append(f'<p class="more">{tree.left_out:,} nodes of the cache are not shown</p>')
    body = "\n".join(parts)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>radix cache</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{_STYLE}</style></head>
<body><h2>{escape(tree.heading)}</h2><p><small>{escape(_LEGEND)}</small></p>
{body}
</body></html>
"""


def _html_rows(tops: list[Line]) -> Iterator[str]:
    """Without recursion: a conversation may be hundreds of nodes deep."""
    open_levels = 0
    for level, line in _walk(tops):
        while open_levels > level:
            yield "</details>"
            open_levels -= 1
        if isinstance(line, int):
            yield f'<div class="more">… {line:,} more</div>'
            continue
        leaf = not line.children and line.more <= 0
        hint = escape(f"{line.facts} · made {ago(line.age_s)} ago")
        yield (
            f'<details{" open" if level < DEEPEST else ""}><summary{" class=leaf" if leaf else ""} title="{hint}">'
            f'<i style="width:{bar(line)}px;background:{colour(line)}"></i><code>{escape(line.quoted)}</code> '
            f"<small>{escape(line.facts)}</small></summary>"
        )
        open_levels = level + 1
    yield "</details>" * open_levels


def _walk(tops: list[Line]) -> Iterator[tuple[int, Line | int]]:
    """Depth first, the level of each; a number stands for so many children that are not shown."""
    left: list[tuple[int, Line | int]] = [(0, top) for top in reversed(tops)]
    while left:
        level, line = left.pop()
        yield level, line
        if isinstance(line, Line):
            if line.more > 0:
                left.append((level + 1, line.more))
            left += [(level + 1, child) for child in reversed(line.children)]


def text(tree: Tree) -> str:
    """For a terminal."""
    lines = [tree.heading]
    for namespace, tops in tree.namespaces.items():
        lines.append(title(namespace))
        for level, line in _walk(tops):
            indent = "  " * min(level + 1, DEEPEST)
            shown = f"… {line:,} more" if isinstance(line, int) else f"{line.quoted}  {line.facts}"
            lines.append(indent + shown)
    if tree.left_out:
        lines.append(f"{tree.left_out:,} nodes of the cache are not shown (--max-nodes, --namespace)")
    return "\n".join(lines) + "\n"
