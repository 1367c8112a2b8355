"""A diagram as an SVG picture. Needs no other program; laid out by ``layout``."""

from __future__ import annotations

from html import escape

from trellis.fsm.drawing import Diagram
from trellis.fsm.layout import LOOP, RADIUS, Layout, Place, Route, arrange

_LINE = 14.0
_TITLE = 34.0
_STYLE = """
  text { font: 11px 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #1b1f24; text-anchor: middle }
  .title { font-size: 13px; text-anchor: start }
  .state { fill: #ffffff; stroke: #1b1f24; stroke-width: 1.3 }
  .more { stroke-dasharray: 3 2 }
  .edge { fill: none; stroke: #57606a; stroke-width: 1.2; marker-end: url(#arrow) }
  .back { stroke: #0969da; marker-end: url(#back) }
  .behind { fill: #ffffff; opacity: 0.9 }
"""
_ARROW = (
    '<marker id="{0}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0.8 L8 4 L0 7.2 z" fill="{1}"/></marker>'
)
_ARROWS = _ARROW.format("arrow", "#57606a") + _ARROW.format("back", "#0969da")


def svg(diagram: Diagram, title: str) -> str:
    """title: a line above the picture, for example the pattern."""
    layout = arrange(diagram)
    width = max(layout.width, 60 + 8.0 * len(title))
    height = layout.height + _TITLE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 {-_TITLE:.0f} {width:.0f} {height:.0f}">',
        f"<style>{_STYLE}</style><defs>{_ARROWS}</defs>",
        f'<rect x="0" y="{-_TITLE:.0f}" width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        f'<text class="title" x="12" y="-12">{_text(title)}</text>',
        *_edges(layout),
        *(_state(layout.states[state.number], state.accepting, state.more) for state in diagram.states),
        *(_label(place.lines, place.x, place.y) for route in layout.routes for place in route.places),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _edges(layout: Layout) -> list[str]:
    start = layout.states[0]
    entry = f'<path class="edge" d="M{start.x - RADIUS - 24:.1f} {start.y:.1f} H{start.x - RADIUS:.1f}"/>'
    return [entry, *map(_path, layout.routes), *(_loop(layout.states[n], t) for n, t in layout.loops.items())]


def _path(route: Route) -> str:
    """A smooth curve through the places, level at each of them; blue if it leads back."""
    places = route.places
    xs = [place.x for place in places]
    back = xs[1] < xs[0]
    toward = -1 if back else 1
    xs[0] += toward * RADIUS
    last = -1 if xs[-1] < xs[-2] else 1
    xs[-1] -= last * RADIUS
    curve = [f"M{xs[0]:.1f} {places[0].y:.1f}"]
    for i in range(1, len(places)):
        if i < len(places) - 1 and places[i].lines:
            half = places[i].width / 2 + 2
            step = 1 if xs[i] > xs[i - 1] else -1
            curve.append(_bend(xs[i - 1], places[i - 1].y, xs[i] - step * half, places[i].y))
            leave = 1 if xs[i + 1] > xs[i] else -1
            curve.append(f"L{xs[i] + leave * half:.1f} {places[i].y:.1f}")
            xs[i] += leave * half
        else:
            curve.append(_bend(xs[i - 1], places[i - 1].y, xs[i], places[i].y))
    return f'<path class="{"edge back" if back else "edge"}" d="{" ".join(curve)}"/>'


def _bend(x0: float, y0: float, x1: float, y1: float) -> str:
    middle = (x0 + x1) / 2
    return f"C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"


def _loop(place: Place, lines: list[str]) -> str:
    """From the upper left of a state round to its upper right, the label above."""
    x, y = place.x, place.y - RADIUS
    curve = f"M{x - 7:.1f} {y + 2:.1f} C{x - 22:.1f} {y - LOOP:.1f} {x + 22:.1f} {y - LOOP:.1f} {x + 7:.1f} {y + 2:.1f}"
    middle = y - LOOP + 4 - _LINE * (len(lines) - 1) / 2 - 2
    return f'<path class="edge" d="{curve}"/>' + _label(lines, x, middle)


def _state(place: Place, accepting: bool, more: bool) -> str:
    kind = "state more" if more else "state"
    at = f'cx="{place.x:.1f}" cy="{place.y:.1f}"'
    inner = f'<circle class="state" {at} r="{RADIUS - 3.5:.1f}"/>' if accepting else ""
    name = f'<text x="{place.x:.1f}" y="{place.y + 4:.1f}">{place.state}</text>'
    return f'<circle class="{kind}" {at} r="{RADIUS:.1f}"/>{inner}{name}'


def _label(lines: list[str], x: float, y: float) -> str:
    if not lines:
        return ""
    width = 6.9 * max(map(len, lines)) + 4
    top = y - _LINE * len(lines) / 2
    box = f'<rect class="behind" x="{x - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{_LINE * len(lines):.1f}"/>'
    texts = [
        f'<text x="{x:.1f}" y="{top + _LINE * (i + 0.75):.1f}">{_text(line)}</text>'
        for i, line in enumerate(lines)
    ]
    return box + "".join(texts)


def _text(text: str) -> str:
    return escape("".join(char if char.isprintable() else "�" for char in text))
