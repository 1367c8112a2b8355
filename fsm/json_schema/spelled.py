"""An automaton written as a pattern: by state elimination (Brzozowski and McCluskey, 1963)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from trellis.fsm.json_schema.pattern_nfa import SURROGATES, Range, TooHard, complement
from trellis.fsm.json_schema.patterns import literal

_LONGEST = 20_000
_EVERYTHING = "(?s:.)"


@dataclass
class Automaton:
    """Deterministic and complete; state 0 is the start.

    segments: disjoint ranges of characters that cover all. rows[state][segment]: the next state.
    """

    segments: list[Range]
    rows: list[list[int]]
    accepting: list[bool]


def spell(automaton: Automaton, most_states: int, tick: Callable[[], None] = lambda: None) -> str | None:
    """An anchored pattern for what the automaton accepts; None if that is nothing. Raises TooHard."""
    classes = _merged(automaton)
    alive = _alive(automaton)
    if 0 not in alive:
        return None
    states = {classes[state] for state in alive}
    if len(states) > most_states:
        raise TooHard("too many states to be written as a pattern")
    edges = _edges(automaton, classes, alive)
    start, end = -1, -2
    edges[start, classes[0]] = ""
    for state in alive:
        if automaton.accepting[state]:
            edges[classes[state], end] = ""
    while states:
        state = _cheapest(edges, states)
        states.remove(state)
        _eliminate(edges, state, tick)
        if sum(map(len, edges.values())) > _LONGEST:
            raise TooHard("the pattern would be too long")
    return rf"^(?:{edges[start, end]})\Z"


def _merged(automaton: Automaton) -> list[int]:
    """For each state the number of its class of equivalent states (Moore's refinement)."""
    classes = [int(accepts) for accepts in automaton.accepting]
    while True:
        signatures: dict[tuple[int, ...], int] = {}
        refined = [
            signatures.setdefault((classes[state], *(classes[target] for target in row)), len(signatures))
            for state, row in enumerate(automaton.rows)
        ]
        if len(signatures) == len(set(classes)):
            return classes
        classes = refined


def _alive(automaton: Automaton) -> set[int]:
    """States from which acceptance can be reached."""
    before: list[set[int]] = [set() for _ in automaton.rows]
    for state, row in enumerate(automaton.rows):
        for target in row:
            before[target].add(state)
    alive = {state for state, accepts in enumerate(automaton.accepting) if accepts}
    pending = list(alive)
    while pending:
        for state in before[pending.pop()] - alive:
            alive.add(state)
            pending.append(state)
    return alive


def texts_of(automaton: Automaton, most: int) -> list[str] | None:
    """All that it accepts; None if that is more than so many texts."""
    alive = _alive(automaton)
    found: list[str] = []
    row = [("", 0)] if 0 in alive else []
    for _ in automaton.rows:  # a longer text would go round a loop
        found += [text for text, state in row if automaton.accepting[state]]
        ways = [
            (text, segment, target)
            for text, state in row
            for segment, target in zip(automaton.segments, automaton.rows[state], strict=True)
            if target in alive
        ]
        if len(found) + sum(high - low + 1 for _, (low, high), _ in ways) > most:
            return None
        row = [
            (text + chr(code), target) for text, (low, high), target in ways for code in range(low, high + 1)
        ]
    return None if row else found


def _edges(automaton: Automaton, classes: list[int], alive: set[int]) -> dict[tuple[int, int], str]:
    ranges: dict[tuple[int, int], list[Range]] = {}
    done: set[int] = set()
    for state in sorted(alive):
        if classes[state] in done:
            continue
        done.add(classes[state])
        for segment, target in zip(automaton.segments, automaton.rows[state], strict=True):
            if target in alive:
                ranges.setdefault((classes[state], classes[target]), []).append(segment)
    return {edge: _class(found) for edge, found in ranges.items()}


def _class(ranges: list[Range]) -> str:
    gaps = complement([*ranges, SURROGATES])
    if not gaps:
        return _EVERYTHING
    if gaps[-1][1] == sys.maxunicode:
        joined = complement([*gaps, SURROGATES])
        if len(joined) == 1 and joined[0][0] == joined[0][1]:
            return literal(chr(joined[0][0]))
        return f"[{_spelled(joined)}]"
    return f"[^{_spelled(gaps)}]"


def _spelled(ranges: list[Range]) -> str:
    return "".join(
        literal(chr(low)) if low == high else f"{literal(chr(low))}-{literal(chr(high))}"
        for low, high in ranges
    )


def _cheapest(edges: dict[tuple[int, int], str], states: set[int]) -> int:
    """The state whose elimination copies the fewest characters (Delgado and Morais, 2004)."""
    incoming = dict.fromkeys(states, 0)
    outgoing = dict.fromkeys(states, 0)
    for source, target in edges:
        if source != target:
            incoming[target] = incoming.get(target, 0) + 1
            outgoing[source] = outgoing.get(source, 0) + 1
    weight = dict.fromkeys(states, 0)
    for (source, target), text in edges.items():
        if source == target:
            weight[source] += len(text) * (incoming[source] * outgoing[source] - 1)
            continue
        if target in weight:
            weight[target] += len(text) * (outgoing[target] - 1)
        if source in weight:
            weight[source] += len(text) * (incoming[source] - 1)
    return min(states, key=weight.__getitem__)


def _eliminate(edges: dict[tuple[int, int], str], state: int, tick: Callable[[], None]) -> None:
    loop = edges.pop((state, state), None)
    around = f"{_group(loop)}*" if loop else ""
    sources = [(edge, edges.pop(edge)) for edge in list(edges) if edge[1] == state]
    targets = [(edge, edges.pop(edge)) for edge in list(edges) if edge[0] == state]
    for (source, _), before in sources:
        tick()
        for (_, target), after in targets:
            through = _sequence(before) + around + _sequence(after)
            known = edges.get((source, target))
            edges[source, target] = through if known is None else f"{known}|{through}"


def _sequence(text: str) -> str:
    return f"(?:{text})" if "|" in text else text


def _group(text: str) -> str:
    return text if len(text) == 1 or text == _EVERYTHING else f"(?:{text})"
