"""The ``outlines`` engine: a table of token transitions, computed in full before the first token.

This is the method of Willard and Louf (2023) as ``outlines-core`` implements it. Its index is known to change
some languages (of ``a|ab`` it takes only ``a``), so it is walked side by side with our own automaton: every
state that is reached must allow the same tokens and accept alike, or the pattern is refused. On request only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from trellis.errors import ConstraintError
from trellis.fsm.automaton import DEAD, START
from trellis.fsm.choices import read_options
from trellis.fsm.compressed import CompressedEngine
from trellis.fsm.contract import ConstraintSpec, Grammar, MaskRow, Vocabulary
from trellis.fsm.flat_trie import LongArray
from trellis.fsm.limits import Budget, Limits
from trellis.fsm.matcher import CompressedGrammar
from trellis.fsm.regex import Regex
from trellis.fsm.syntax import INF, Alt, Cat, Chars, Node, Rep
from trellis.fsm.token_automaton import TokenAutomaton
from trellis.fsm.trie import trie_of

# Transitions of the whole index: 3 s and 300 MB. What grows beyond is what the lazy engines are for.
_TRANSITIONS = 1_000_000
_META = frozenset(r"\.+*?()|[]{}^$#&-~")


class OutlinesEngine:
    """An ``Engine`` (see ``registry``) for regular expressions and lists of options."""

    name = "outlines"
    kinds = frozenset({"regex", "choices"})

    def compile(self, spec: ConstraintSpec, vocabulary: Vocabulary, limits: Limits) -> Grammar:
        """Raises ConstraintError: as ``compressed`` does, and ``unsupported`` where the index differs."""
        if find_spec("outlines_core") is None:
            reason = "the outlines engine needs a package that is not installed: pip install outlines-core"
            raise ConstraintError(spec.kind, "unsupported", "", reason)
        ours = CompressedEngine().compile(spec, vocabulary, limits)
        assert isinstance(ours, CompressedGrammar)

        def make() -> _IndexStates:
            own = CompressedEngine().compile(spec, vocabulary, limits)
            assert isinstance(own, CompressedGrammar)
            assert isinstance(own.automaton, TokenAutomaton)
            return _verified(spec, own.automaton, vocabulary, limits)

        def accepts(data: bytes) -> bool:
            return ours.accepts(data)

        return CompressedGrammar(make, accepts, vocabulary, ours.warnings, self.name)


class _IndexStates:
    """``TokenStates`` of an index. Its states are numbered here: 0 is dead, 1 the start.

    rows: the transitions of each state, token to state, without EOS. partner: a state of our automaton with
    the same language; it gives the forced runs.
    """

    def __init__(
        self,
        rows: list[dict[int, int]],
        accepting: list[bool],
        partner: list[int],
        ours: TokenAutomaton,
        vocabulary: Vocabulary,
    ) -> None:
        self._rows = rows
        self._accepting = accepting
        self._partner = partner
        self._ours = ours
        self._vocabulary = vocabulary
        self._masks: dict[int, MaskRow] = {}
        self._transitions = sum(map(len, rows))

    @property
    def nbytes(self) -> int:
        return (
            100 * self._transitions + 4 * self._vocabulary.mask_words * len(self._masks) + self._ours.nbytes
        )

    @property
    def states(self) -> int:
        return len(self._rows)

    @property
    def masks(self) -> int:
        return len(self._masks)

    def mask(self, state: int) -> MaskRow:
        found = self._masks.get(state)
        if found is None:
            tokens = [*self._rows[state], *(self._vocabulary.eos_token_ids if self._accepting[state] else ())]
            found = self._masks[state] = _packed(tokens, self._vocabulary)
        return found

    def step(self, state: int, token: int) -> int:
        return self._rows[state].get(token, DEAD)

    def accepting(self, state: int) -> bool:
        return self._accepting[state]

    def ends(self, state: int) -> bool:
        return not self._rows[state]

    def run(self, state: int, output: Sequence[int]) -> tuple[int, ...]:
        return self._ours.run(self._partner[state], output)

    def draft(self, state: int, output: Sequence[int]) -> tuple[int, ...]:
        return self._ours.draft(self._partner[state], output)

    def begin(self, data: bytes) -> int:
        """As far as the index knows: it moves by tokens, so the data is led through it in its own spelling."""
        try:
            state = START
            for token in self._vocabulary.encode(data.decode()):
                state = self._rows[state].get(token, DEAD)
            return state
        except UnicodeDecodeError:
            return DEAD

    def spanning(self, data: bytes) -> LongArray:
        length, spelled = len(data), self._vocabulary.token_bytes
        ids = self._ours.spanning(data)
        return ids[[self.begin(spelled[token][length:]) != DEAD for token in ids.tolist()]]

    def joint_run(self, output: Sequence[int], data: bytes) -> tuple[int, ...]:
        return self._ours.joint_run(output, data)


def _packed(tokens: list[int], vocabulary: Vocabulary) -> MaskRow:
    bits = np.zeros(vocabulary.mask_words * 32, np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _verified(
    spec: ConstraintSpec, ours: TokenAutomaton, vocabulary: Vocabulary, limits: Limits
) -> _IndexStates:
    budget = Budget(spec.kind, limits)
    budget.start(limits.compile_s)
    _check_size(spec.kind, ours, budget)
    index = _index(spec, vocabulary, limits)
    budget.check()
    table: dict[int, dict[int, int]] = index.get_transitions()
    numbers: dict[int, int] = {}
    partner: dict[int, int] = {}
    walk = _Walk(spec.kind, index, table, ours, vocabulary)
    stack = [(index.get_initial_state(), START)]
    seen = set(stack)
    while stack:
        budget.check()
        theirs, own = stack.pop()
        numbers.setdefault(theirs, len(numbers) + 1)
        partner.setdefault(theirs, own)
        for pair in walk.compare(theirs, own):
            if pair not in seen:
                seen.add(pair)
                stack.append(pair)
    order = sorted(numbers, key=numbers.__getitem__)
    rows = [
        {token: numbers[to] for token, to in table.get(state, {}).items() if token in walk.plain}
        for state in order
    ]
    accepting = [bool(index.is_final_state(state)) for state in order]
    return _IndexStates(
        [{}, *rows], [False, *accepting], [DEAD, *(partner[s] for s in order)], ours, vocabulary
    )


def _check_size(kind: str, ours: TokenAutomaton, budget: Budget) -> None:
    """Our own automaton is walked first, as it can be bounded, and the index is at least as large."""
    seen, stack, total = {START}, [START], 0
    while stack:
        budget.check()
        tokens, states = ours.successors(stack.pop())
        total += len(tokens)
        if total > _TRANSITIONS:
            reason = f"the index would have more than {_TRANSITIONS} transitions; use another engine"
            raise ConstraintError(kind, "limit", "", reason)
        fresh = set(np.unique(states).tolist()) - seen
        seen |= fresh
        stack.extend(fresh)


class _Walk:
    """One step of the walk of both automata. plain: tokens that stand for text."""

    def __init__(
        self,
        kind: str,
        index: Any,
        table: dict[int, dict[int, int]],
        ours: TokenAutomaton,
        vocabulary: Vocabulary,
    ) -> None:
        self._kind = kind
        self._index = index
        self._table = table
        self._ours = ours
        self._vocabulary = vocabulary
        self.plain = frozenset(token for token, data in enumerate(trie_of(vocabulary).data) if data)

    def compare(self, theirs: int, own: int) -> list[tuple[int, int]]:
        """The pairs that one more token leads to. Raises ``unsupported`` if the two states differ."""
        row = {token: to for token, to in self._table.get(theirs, {}).items() if token in self.plain}
        final = bool(self._index.is_final_state(theirs))
        eos = self._vocabulary.eos_token_ids if final else frozenset()
        same = final == self._ours.accepting(own)
        if not same or not np.array_equal(_packed([*row, *eos], self._vocabulary), self._ours.mask(own)):
            reason = "the index of outlines-core has another language than this pattern; use another engine"
            raise ConstraintError(self._kind, "unsupported", "", reason)
        tokens, states = self._ours.successors(own)
        return list(
            {(row[token], state) for token, state in zip(tokens.tolist(), states.tolist(), strict=True)}
        )


def _index(spec: ConstraintSpec, vocabulary: Vocabulary, limits: Limits) -> Any:
    pattern = spec.source if spec.kind == "choices" else _without_assertions(spec.source, limits)
    if spec.kind == "choices":
        # Of alternatives the first that fits wins, so the longest stands first.
        options = sorted(read_options(spec.source, limits), key=len, reverse=True)
        pattern = "|".join("".join("\\" + c if c in _META else c for c in option) for option in options)
    try:
        return import_module("outlines_core").Index(pattern, _tokens_of(vocabulary))
    except ValueError as error:
        message = str(error).partition("\n")[0][:200]
        raise ConstraintError(spec.kind, "unsupported", "", f"outlines-core refuses it: {message}") from error


def _without_assertions(pattern: str, limits: Limits) -> str:
    """A pattern that outlines-core can read: it knows no anchors and no look-around.

    Those that can be resolved in the tree are; ``unsupported`` says where one is left.
    """
    regex = Regex(pattern, limits)
    return _written(regex.tree(regex.builder())) if regex.has_assertions else pattern


def _written(node: Node) -> str:
    if isinstance(node, Chars):
        return "[" + "".join(f"\\x{{{lo:x}}}-\\x{{{hi:x}}}" for lo, hi in node.ranges) + "]"
    if isinstance(node, Rep):
        return f"(?:{_written(node.body)}){{{node.lo},{'' if node.hi == INF else node.hi}}}"
    assert isinstance(node, (Cat, Alt))
    return "(?:" + ("" if isinstance(node, Cat) else "|").join(map(_written, node.parts)) + ")"


@lru_cache(maxsize=4)
def _tokens_of(vocabulary: Vocabulary) -> Any:
    ids: dict[bytes, list[int]] = {}
    for token, data in enumerate(trie_of(vocabulary).data):
        if data:
            ids.setdefault(data, []).append(token)
    return import_module("outlines_core").Vocabulary(min(vocabulary.eos_token_ids), ids)
