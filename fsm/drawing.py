"""The automaton of a constraint as a diagram: what is drawn, before it is written as DOT or SVG.

An automaton runs over bytes; a diagram has an edge for a *character*, so that ``é`` is one step and ``\\w`` one
edge and not some hundred states inside UTF-8. Compressed, a chain of states with one way on is one edge.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from functools import partial

from trellis.fsm.automaton import START, ByteAutomaton
from trellis.fsm.charset import Ranges, normalize, size
from trellis.fsm.labels import characters, octets, quoted

EXPLORED = 5000  # states


@dataclass(frozen=True)
class State:
    """accepting: the text may end here. more: it has edges that are not drawn."""

    number: int
    accepting: bool
    more: bool = False


@dataclass(frozen=True)
class Edge:
    """path: the sets of characters (or bytes) that are read one after the other; all but the first are of one."""

    source: int
    target: int
    path: tuple[Ranges, ...]
    label: str


@dataclass(frozen=True)
class Diagram:
    """States by number, the start first. whole: False if there were more than could be drawn."""

    states: list[State]
    edges: list[Edge]
    whole: bool


@dataclass(frozen=True)
class _Way:
    """A step of the automaton: one character (or byte) out of a set."""

    target: int
    ranges: Ranges


@dataclass(frozen=True)
class _Path:
    """One edge: the sets that are read, and the state that this leads to."""

    target: int
    path: tuple[Ranges, ...]


@dataclass(frozen=True)
class Explored:
    """An automaton's states and steps as far as they were looked at. over_bytes: a step is a byte."""

    automaton: ByteAutomaton
    over_bytes: bool
    ways: dict[int, list[_Way]]


def explore(automaton: ByteAutomaton, over_bytes: bool = False) -> Explored:
    """Look at the states that are nearest to the start, at most ``EXPLORED``.

    Raises ConstraintError when the automaton cannot be built within its budget.
    """
    step = partial(_bytes_on, automaton) if over_bytes else _Characters(automaton).on
    ways: dict[int, list[_Way]] = {}
    queue, seen = deque([START]), {START}
    while queue and len(ways) < EXPLORED:
        state = queue.popleft()
        ways[state] = step(state)
        fresh = dict.fromkeys(way.target for way in ways[state] if way.target not in seen)
        seen.update(fresh)
        queue.extend(fresh)
    return Explored(automaton, over_bytes, ways)


def draw(explored: Explored, compressed: bool = True, limit: int = EXPLORED) -> Diagram:
    """The states that are nearest to the start, at most ``limit``. compressed: chains become one edge."""
    if compressed:
        paths = _joined(explored.automaton, explored.ways)
    else:
        paths = {s: [_Path(way.target, (way.ranges,)) for way in out] for s, out in explored.ways.items()}
    return _numbered(explored.automaton, paths, limit, explored.over_bytes)


def _joined(automaton: ByteAutomaton, ways: dict[int, list[_Way]]) -> dict[int, list[_Path]]:
    """Chains as one edge. A state stays if it accepts, branches, or is entered from several sides."""
    entered = Counter(way.target for out in ways.values() for way in out)
    inner = {
        state: out[0]
        for state, out in ways.items()
        if len(out) == 1 and size(out[0].ranges) == 1 and entered[state] == 1
    }
    inner = {s: way for s, way in inner.items() if s != START and not automaton.accepting(s)}
    return {s: [_chain(way, inner) for way in out] for s, out in ways.items() if s not in inner}


def _chain(way: _Way, inner: dict[int, _Way]) -> _Path:
    """The edge that begins with this way and goes on through inner states."""
    path = [way.ranges]
    target = way.target
    while target in inner:
        path.append(inner[target].ranges)
        target = inner[target].target
    return _Path(target, tuple(path))


def _label(path: tuple[Ranges, ...], over_bytes: bool) -> str:
    """``[0-9]``, ``"abc"``, or a set and the text that must follow it."""
    first, codes = path[0], [ranges[0][0] for ranges in path[1:]]
    if size(first) == 1 and codes:
        return _text([first[0][0], *codes], over_bytes)
    values = (byte for lo, hi in first for byte in range(lo, hi + 1))
    label = octets(values) if over_bytes else characters(first)
    return f"{label} {_text(codes, over_bytes)}" if codes else label


def _text(codes: list[int], over_bytes: bool) -> str:
    return quoted(
        bytes(codes).decode("utf-8", "backslashreplace") if over_bytes else "".join(map(chr, codes))
    )


def _bytes_on(automaton: ByteAutomaton, state: int) -> list[_Way]:
    by_target: dict[int, list[tuple[int, int]]] = {}
    for byte in automaton.live_bytes(state):
        by_target.setdefault(automaton.step(state, bytes([byte])), []).append((byte, byte))
    return [_Way(target, normalize(pairs)) for target, pairs in by_target.items()]


class _Characters:
    """Steps by whole characters. States inside a character that lead to the same ones are looked at once."""

    def __init__(self, automaton: ByteAutomaton) -> None:
        self._automaton = automaton
        self._rests: dict[tuple[int, int], dict[int, Ranges]] = {}

    def on(self, state: int) -> list[_Way]:
        by_target: dict[int, list[tuple[int, int]]] = {}
        for byte in self._automaton.live_bytes(state):
            length, bits = _lead(byte)
            reached = self._automaton.step(state, bytes([byte]))
            base = (byte & bits) << 6 * (length - 1)
            for target, ranges in self._rest(reached, length - 1).items():
                by_target.setdefault(target, []).extend((base + lo, base + hi) for lo, hi in ranges)
        return [_Way(target, normalize(pairs)) for target, pairs in by_target.items()]

    def _rest(self, state: int, count: int) -> dict[int, Ranges]:
        """Where ``count`` more bytes lead, and the numbers that their bits make up."""
        if count == 0:
            return {state: ((0, 0),)}
        found = self._rests.get((state, count))
        if found is None:
            pairs: dict[int, list[tuple[int, int]]] = {}
            for byte in self._automaton.live_bytes(state):
                base = (byte & 0x3F) << 6 * (count - 1)
                reached = self._automaton.step(state, bytes([byte]))
                for target, ranges in self._rest(reached, count - 1).items():
                    pairs.setdefault(target, []).extend((base + lo, base + hi) for lo, hi in ranges)
            found = self._rests[state, count] = {t: _merged(p) for t, p in pairs.items()}
        return found


def _lead(byte: int) -> tuple[int, int]:
    """Bytes of the character that begins with this one, and a mask of the bits that count."""
    if byte < 0x80:
        return 1, 0x7F
    return (2, 0x1F) if byte < 0xE0 else (3, 0x0F) if byte < 0xF0 else (4, 0x07)


def _merged(pairs: list[tuple[int, int]]) -> Ranges:
    """Sorted and joined; parts of a code point, so not cut to characters as ``normalize`` does."""
    out: list[tuple[int, int]] = []
    for lo, hi in sorted(pairs):
        if out and lo <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(hi, out[-1][1]))
        else:
            out.append((lo, hi))
    return tuple(out)


def _numbered(
    automaton: ByteAutomaton, paths: dict[int, list[_Path]], limit: int, over_bytes: bool
) -> Diagram:
    """States numbered from 0 in the order in which they are reached; edges to what is not drawn are left out."""
    numbers: dict[int, int] = {START: 0}
    queue = deque([START])
    drawn: list[Edge] = []
    cut: set[int] = set()
    while queue:
        state = queue.popleft()
        if state not in paths:
            cut.add(state)
        for way in paths.get(state, []):
            if way.target not in numbers:
                if len(numbers) >= limit:
                    cut.add(state)
                    continue
                numbers[way.target] = len(numbers)
                queue.append(way.target)
            label = _label(way.path, over_bytes)
            drawn.append(Edge(numbers[state], numbers[way.target], way.path, label))
    states = [State(n, automaton.accepting(s), s in cut) for s, n in numbers.items()]
    return Diagram(states, drawn, not cut)
