"""A program's graph as text, DOT, SVG and HTML. Nothing of it needs another program, or loads anything."""

from __future__ import annotations

import html
import re

from trellis.frontend.tracing.graph import Trace
from trellis.frontend.tracing.layout import Box, Layout, layout

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 300, 30, 30, 22, 16  # pixels
_LETTERS = 40  # of a label in a box; all of it is its tooltip
_COLOURS = {
    "text": ("#f5f5f4", "#a8a29e"),
    "model": ("#dcfce7", "#16a34a"),
    "role": ("#e0e7ff", "#6366f1"),
    "order": ("#fef9c3", "#ca8a04"),
    "stop": ("#fee2e2", "#dc2626"),
}
"""kind → (fill, border)."""


class Drawing:
    """``print`` it for the text. In a notebook it shows itself as the picture."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._layout = layout(trace)

    def __str__(self) -> str:
        return str(self.trace)

    def __repr__(self) -> str:
        return f"<Drawing of program {self.trace.program!r}: {len(self._layout.boxes)} nodes>"

    def dot(self) -> str:
        """The graph in Graphviz' language."""
        return _dot(self.trace.program, self._layout)

    def svg(self) -> str:
        """The graph as an SVG element. Boxes are in the order of the program from top to bottom; a branch is a column; a
        dashed arrow leads from a variable to the text that it stands in."""
        return _svg(self._layout)

    def html(self) -> str:
        """A page of its own, with the picture and the text."""
        title = html.escape(_visible(self.trace.program))
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            f"<title>{title}</title>\n<style>body{{font-family:sans-serif;margin:2em}}pre{{white-space:pre-wrap}}</style>"
            f"</head>\n<body><h1>{title}</h1>\n{self.svg()}\n<pre>{html.escape(_visible(str(self)))}</pre></body></html>\n"
        )

    def _repr_html_(self) -> str:
        return self.svg()


def _visible(text: str) -> str:
    """The text with signs for what XML cannot hold: control characters and half surrogates."""

    def sign(found: re.Match[str]) -> str:
        code = ord(found[0])
        return chr(0x2400 + code) if code < 32 else "\ufffd"

    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", sign, text)


def _short(label: str) -> str:
    return label if len(label) <= _LETTERS else label[: _LETTERS - 1] + "…"


def _whole(box: Box) -> str:
    return box.label if box.line is None else f"line {box.line}: {box.label}"


def _dot(name: str, graph: Layout) -> str:
    lines = [f"digraph {_quoted(name)} {{", '  node [shape=box, style=filled, fontname="sans-serif"];']
    for box in graph.boxes:
        fill, border = _COLOURS[box.kind]
        lines.append(
            f'  n{box.number} [label={_quoted(_short(box.label))}, tooltip={_quoted(_whole(box))}, fillcolor="{fill}", '
            f'color="{border}"];'
        )
    for arrow in graph.arrows:
        style = " [style=dashed]" if arrow.reads else ""
        lines.append(f"  n{arrow.source} -> n{arrow.target}{style};")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    plain = _visible(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{plain}"'


def _corner(box: Box) -> tuple[int, int]:
    return _MARGIN + box.column * (_WIDTH + _GAP_X), _MARGIN + box.row * (_HEIGHT + _GAP_Y)


def _svg(graph: Layout) -> str:
    width = 2 * _MARGIN + max((_corner(box)[0] for box in graph.boxes), default=0) + _WIDTH
    height = 2 * _MARGIN + max((_corner(box)[1] for box in graph.boxes), default=0) + _HEIGHT
    corners = {box.number: _corner(box) for box in graph.boxes}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#57534e"/></marker></defs>',
    ]
    for arrow in graph.arrows:
        parts.append(_path(corners[arrow.source], corners[arrow.target], arrow.reads))
    parts.extend(map(_rectangle, graph.boxes))
    return "\n".join([*parts, "</svg>"])


def _path(source: tuple[int, int], target: tuple[int, int], reads: bool) -> str:
    dashes = ' stroke-dasharray="4 3"' if reads else ""
    if reads and source[0] == target[0]:  # beside the column, or it would hide behind the boxes
        x, y0, y1 = source[0] + _WIDTH, source[1] + _HEIGHT // 2, target[1] + _HEIGHT // 2
        way = f"M{x} {y0}C{x + _GAP_X} {y0} {x + _GAP_X} {y1} {x} {y1}"
    else:
        x0, y0 = source[0] + _WIDTH // 2, source[1] + _HEIGHT
        x1, y1 = target[0] + _WIDTH // 2, target[1]
        way = f"M{x0} {y0}C{x0} {y0 + _GAP_Y} {x1} {y1 - _GAP_Y} {x1} {y1}"
    return f'<path d="{way}" fill="none" stroke="#57534e" marker-end="url(#tip)"{dashes}/>'


def _rectangle(box: Box) -> str:
    x, y = _corner(box)
    fill, border = _COLOURS[box.kind]
    label, whole = html.escape(_visible(_short(box.label))), html.escape(_visible(_whole(box)))
    return (
        f'<g><title>{whole}</title><rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill="{fill}" '
        f'stroke="{border}"/><text x="{x + 10}" y="{y + _HEIGHT // 2 + 4}">{label}</text></g>'
    )
