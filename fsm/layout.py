"""Places for the states and labels of a diagram: layers from left to right, in Sugiyama's manner.

Back edges are turned round, states get the layer of their longest way from the start, every edge gets a place
of its own in each layer that it passes (its label in one of them), and places are ordered by the mean of their
neighbours, so that edges cross seldom and labels never lie on each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from trellis.fsm.drawing import Diagram

_SWEEPS = 12
_GAP_X, _GAP_Y = 26.0, 14.0
_CHARACTER = 6.7  # width of a character of a label
_LINE = 14.0  # height of a line of a label
RADIUS = 15.0
LOOP = 22.0  # height of the loop above a state, without its label


@dataclass(eq=False)
class Place:
    """Something with a centre (x, y): a state, a label, or a point that an edge passes.

    state: its number or -1. lines: text of a label. above: room above the centre.
    """

    layer: int
    state: int = -1
    lines: list[str] = field(default_factory=list)
    width: float = 0.0
    above: float = 0.0
    below: float = 0.0
    x: float = 0.0
    y: float = 0.0


@dataclass(frozen=True)
class Route:
    """An edge: the places that it passes, from its source to its target."""

    places: list[Place]


@dataclass(frozen=True)
class Layout:
    """states: by number. loops: labels of the edges from a state to itself. Sizes in pixels."""

    states: list[Place]
    routes: list[Route]
    loops: dict[int, list[str]]
    width: float
    height: float


def arrange(diagram: Diagram) -> Layout:
    """O(sweeps x places x log places)."""
    labels: dict[tuple[int, int], list[str]] = {}
    for edge in diagram.edges:
        labels.setdefault((edge.source, edge.target), []).append(edge.label)
    loops = {a: lines for (a, b), lines in labels.items() if a == b}
    between = {pair: lines for pair, lines in labels.items() if pair[0] != pair[1]}
    layers = _layers(len(diagram.states), between)
    states = [_state(n, 2 * layers[n], loops.get(n, [])) for n in range(len(diagram.states))]
    routes = [_route(states[a], states[b], lines) for (a, b), lines in between.items()]
    rows = _rows(states, routes)
    neighbours = _neighbours(routes)
    _order(rows, neighbours)
    _spread(rows, neighbours)
    width = _columns(rows)
    height = _to_top(place for row in rows for place in row)
    return Layout(states, routes, loops, width, height)


def _state(number: int, layer: int, loop: list[str]) -> Place:
    above = RADIUS + (LOOP + _LINE * len(loop) if loop else 0)
    width = max(2 * RADIUS, _text_width(loop))
    return Place(layer, number, width=width, above=above, below=RADIUS)


def _text_width(lines: list[str]) -> float:
    return max((len(line) for line in lines), default=0) * _CHARACTER


def _layers(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Longest way from state 0 along edges that do not go back."""
    out: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        out[a].append(b)
    order: list[int] = []  # depth first, each state after those that it leads to
    entered, left = {0}, set[int]()
    stack = [(0, iter(out[0]))]
    forward: list[tuple[int, int]] = []
    while stack:
        state, following = stack[-1]
        for target in following:
            if target not in entered or target in left:
                forward.append((state, target))
            if target not in entered:
                entered.add(target)
                stack.append((target, iter(out[target])))
                break
        else:
            stack.pop()
            left.add(state)
            order.append(state)
    ahead: list[list[int]] = [[] for _ in range(count)]
    for a, b in forward:
        ahead[a].append(b)
    layers = [0] * count
    for state in reversed(order):
        for target in ahead[state]:
            layers[target] = max(layers[target], layers[state] + 1)
    return layers


def _route(source: Place, target: Place, lines: list[str]) -> Route:
    """The label stands next to the source; between two states of one layer, or backwards, as well."""
    step = 1 if target.layer > source.layer else -1
    if target.layer == source.layer:
        passed = [Place(source.layer + 1)]
    else:
        passed = [Place(layer) for layer in range(source.layer + step, target.layer, step)]
    label = passed[0]
    label.lines = lines
    label.width = _text_width(lines)
    label.above = label.below = _LINE * len(lines) / 2
    return Route([source, *passed, target])


def _rows(states: list[Place], routes: list[Route]) -> list[list[Place]]:
    rows: list[list[Place]] = [
        [] for _ in range(2 + max(place.layer for r in _all(states, routes) for place in r))
    ]
    for state in states:
        rows[state.layer].append(state)
    for route in routes:
        for place in route.places[1:-1]:
            rows[place.layer].append(place)
    return [row for row in rows if row]


def _all(states: list[Place], routes: list[Route]) -> list[list[Place]]:
    return [states, *(route.places for route in routes)]


def _neighbours(routes: list[Route]) -> dict[Place, list[Place]]:
    found: dict[Place, list[Place]] = {}
    for route in routes:
        for a, b in zip(route.places, route.places[1:], strict=False):
            found.setdefault(a, []).append(b)
            found.setdefault(b, []).append(a)
    return found


def _order(rows: list[list[Place]], neighbours: dict[Place, list[Place]]) -> None:
    """Each row by the mean place of its neighbours in the row before, then in the row after, and again."""
    for row in rows:
        _index(row)
    for sweep in range(_SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            side = row[0].layer - (1 if sweep % 2 == 0 else -1)
            row.sort(
                key=lambda place: _mean(place, [n for n in neighbours.get(place, []) if n.layer == side])
            )
            _index(row)


def _index(row: list[Place]) -> None:
    for i, place in enumerate(row):
        place.y = i - (len(row) - 1) / 2


def _mean(place: Place, near: list[Place]) -> float:
    return sum(n.y for n in near) / len(near) if near else place.y


def _spread(rows: list[list[Place]], neighbours: dict[Place, list[Place]]) -> None:
    """Pixels from the order: each place near the mean of its neighbours, as far as its row leaves room."""
    for row in rows:
        y = 0.0
        for place in row:
            place.y = y + place.above
            y = place.y + place.below + _GAP_Y
        for place in row:
            place.y -= y / 2
    for sweep in range(_SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = [_mean(place, neighbours.get(place, [])) for place in row]
            _separate(row, wanted)


def _separate(row: list[Place], wanted: list[float]) -> None:
    """Down and up passes that keep the distances; the mean of the two is as near to what is wanted on both."""
    down = list(wanted)
    for i in range(1, len(row)):
        down[i] = max(down[i], down[i - 1] + row[i - 1].below + _GAP_Y + row[i].above)
    up = list(wanted)
    for i in range(len(row) - 2, -1, -1):
        up[i] = min(up[i], up[i + 1] - row[i + 1].above - _GAP_Y - row[i].below)
    for place, low, high in zip(row, down, up, strict=True):
        place.y = (low + high) / 2


def _columns(rows: list[list[Place]]) -> float:
    """x of every row; returns the width of all."""
    x = 2 * _GAP_X
    for row in rows:
        width = max(place.width for place in row)
        for place in row:
            place.x = x + width / 2
        x += width + _GAP_X
    return x + _GAP_X


def _to_top(places: Iterable[Place]) -> float:
    """Moves all so that the highest begins at the margin; returns the height of all."""
    found = list(places)
    top = min(place.y - place.above for place in found) - _GAP_Y
    for place in found:
        place.y -= top
    return max(place.y + place.below for place in found) + _GAP_Y
