"""What is done to the rules of a grammar before a parser gets them: measured, trimmed, written out again.

A parser goes ahead as long as some rule can go on. Where a rule can never end, or only with a character that
the vocabulary cannot write, that is a dead end; so such alternatives are taken out first. What is left has the
property that whatever the parser takes can be completed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from trellis.fsm.charset import Ranges, intersect
from trellis.fsm.gbnf import EMPTY, Alt, Chars, Node, Ref, Repeat, Seq, refuse
from trellis.fsm.limits import Budget, Limits

Rules = dict[str, Node]
_PLAIN = frozenset(
    map(ord, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _.,:;(){}<>=+*/!?@#$%&|~`'")
)


def check_size(rules: Rules, limits: Limits) -> None:
    """Raises ConstraintError ``limit`` if the grammar, its bounded repeats unrolled, has too many places."""
    total = sum(_places(node) for node in rules.values())
    if total > limits.positions:
        reason = f"the grammar has {total} places; at most {limits.positions} are allowed; simplify it"
        raise refuse("limit", "", reason)


def check_lengths(rules: Rules, limits: Limits, budget: Budget) -> None:
    """Raises ConstraintError ``limit`` if some rule has only very long texts: rules that double each other
    (``a ::= b b``, ``b ::= c c``, ...) force texts without bound, which no request could finish."""
    for name, length in shortest(rules, budget).items():
        if length > limits.positions:
            reason = f"the shortest text of rule {name!r} has {length} characters; at most {limits.positions}"
            raise refuse("limit", "", reason + " are allowed")


def _places(node: Node) -> int:
    if isinstance(node, (Seq, Alt)):
        return 1 + sum(map(_places, node.items if isinstance(node, Seq) else node.options))
    if isinstance(node, Repeat):
        return _places(node.item) * max(node.low, node.high or 1, 1)
    return 1


def trim(rules: Rules, alphabet: Ranges, budget: Budget) -> Rules:
    """The rules without what can never be completed in this alphabet, and without those out of use.

    ``root`` is left out if nothing satisfies it.
    """
    written = {name: _restrict(node, alphabet) for name, node in rules.items()}
    lengths = shortest(written, budget)
    kept = {name: _drop(node, lengths) for name, node in written.items() if name in lengths}
    used: Rules = {}
    stack = ["root"] if "root" in kept else []
    while stack:
        name = stack.pop()
        if name not in used:
            used[name] = kept[name]
            stack.extend(sorted(_refs(kept[name])))
    return used


def shortest(rules: Rules, budget: Budget) -> dict[str, int]:
    """Characters of the shortest text of each rule that has one.

    Rules are settled in order of that length, so each is final when it is taken: Knuth's generalisation of
    Dijkstra's algorithm (1977).
    """
    users: dict[str, set[str]] = {name: set() for name in rules}
    for name, node in rules.items():
        for used in _refs(node):
            users[used].add(name)
    found: dict[str, int] = {}
    heap: list[tuple[int, str]] = []
    affected: Iterable[str] = rules
    while True:
        for name in affected:
            budget.tick()
            if name not in found and (length := _length(rules[name], found)) is not None:
                heappush(heap, (length, name))
        while heap and heap[0][1] in found:
            heappop(heap)
        if not heap:
            return found
        length, name = heappop(heap)
        found[name] = length
        affected = users[name]


def _length(node: Node, known: dict[str, int]) -> int | None:
    """Characters of the shortest text, given those of other rules; None if there is none."""
    if isinstance(node, Chars):
        return 1 if node.ranges else None
    if isinstance(node, Ref):
        return known.get(node.name)
    if isinstance(node, Seq):
        total = 0
        for item in node.items:
            if (part := _length(item, known)) is None:
                return None
            total += part
        return total
    if isinstance(node, Alt):
        return min((n for o in node.options if (n := _length(o, known)) is not None), default=None)
    if node.low == 0:
        return 0
    once = _length(node.item, known)
    return None if once is None else once * node.low


def _restrict(node: Node, alphabet: Ranges) -> Node:
    """The node with only characters of the alphabet."""
    if isinstance(node, Chars):
        return Chars(intersect(node.ranges, alphabet))
    return _rebuild(node, lambda inner: _restrict(inner, alphabet))


def _drop(node: Node, lengths: dict[str, int]) -> Node:
    """The node without alternatives that have no text; the node itself has one."""
    if isinstance(node, Alt):
        live = [_drop(o, lengths) for o in node.options if _length(o, lengths) is not None]
        return live[0] if len(live) == 1 else Alt(tuple(live))
    if isinstance(node, Repeat) and _length(node.item, lengths) is None:
        return EMPTY
    return _rebuild(node, lambda inner: _drop(inner, lengths))


def _rebuild(node: Node, change: Callable[[Node], Node]) -> Node:
    if isinstance(node, Seq):
        return Seq(tuple(change(item) for item in node.items))
    if isinstance(node, Alt):
        return Alt(tuple(change(option) for option in node.options))
    if isinstance(node, Repeat):
        return Repeat(change(node.item), node.low, node.high)
    return node


def _refs(node: Node) -> set[str]:
    if isinstance(node, Ref):
        return {node.name}
    if isinstance(node, Repeat):
        return _refs(node.item)
    if isinstance(node, (Seq, Alt)):
        return set().union(*map(_refs, node.items if isinstance(node, Seq) else node.options))
    return set()


def write(rules: Rules) -> str:
    """Trimmed rules as GBNF text for a parser, names numbered, every character outside of words escaped.

    ``root`` only refers to the first rule: a parser may treat the rule at the top apart (xgrammar's masks then
    lack tokens that cross its end when it refers to itself).
    """
    names = {name: f"r{number}" for number, name in enumerate(rules)}
    lines = [f"root ::= {names['root']}"]
    lines += [f"{names[name]} ::= {_text(node, names)}" for name, node in rules.items()]
    return "\n".join(lines) + "\n"


def _text(node: Node, names: dict[str, str]) -> str:
    if isinstance(node, Chars):
        return _class(node.ranges)
    if isinstance(node, Ref):
        return names[node.name]
    if isinstance(node, Seq):
        return _sequence(node, names)
    if isinstance(node, Alt):
        return "(" + " | ".join(_text(option, names) for option in node.options) + ")"
    if node.high == 0:
        return '""'
    bounds = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((node.low, node.high))
    if bounds is None:
        bounds = f"{{{node.low},{'' if node.high is None else node.high}}}"
    return f"({_text(node.item, names)}){bounds}"


def _sequence(node: Seq, names: dict[str, str]) -> str:
    """Runs of single characters become one literal."""
    parts: list[str] = []
    literal = ""
    for item in node.items:
        if isinstance(item, Chars) and len(item.ranges) == 1 and item.ranges[0][0] == item.ranges[0][1]:
            literal += _escape(item.ranges[0][0])
            continue
        if literal:
            parts.append(f'"{literal}"')
            literal = ""
        parts.append(_text(item, names))
    if literal or not parts:
        parts.append(f'"{literal}"')
    return parts[0] if len(parts) == 1 else "(" + " ".join(parts) + ")"


def _class(ranges: Ranges) -> str:
    return (
        "[" + "".join(f"{_escape(lo)}-{_escape(hi)}" if lo < hi else _escape(lo) for lo, hi in ranges) + "]"
    )


def _escape(code: int) -> str:
    if code in _PLAIN:
        return chr(code)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
