"""A byte automaton seen through a vocabulary: masks, steps and forced runs in tokens, all kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trellis.fsm.automaton import DEAD, START, ByteAutomaton, chain
from trellis.fsm.contract import MaskRow
from trellis.fsm.flat_trie import LongArray
from trellis.fsm.forced import forced_run, held_back, kind_of, tail_of, whole_characters
from trellis.fsm.limits import Budget
from trellis.fsm.trie import TokenTrie
from trellis.fsm.walk import TrieWalk

_STEPS_KEPT = 1 << 16
_RUNS_KEPT = 1 << 12


@dataclass(frozen=True)
class _Chain:
    """Forced bytes (whole characters), the state after them, and what may follow there, one of each kind."""

    forced: bytes
    end: int
    following: list[str]


class TokenAutomaton:
    """Shared by all matchers of a grammar and thread-safe: what is not kept is worked out under a lock.

    bytewise: see ``Spelling``; if False, a state inside a character may be one that no token completes.
    Every method may raise ConstraintError (``limit``, ``timeout``) when it has to build and may not.
    """

    def __init__(self, automaton: ByteAutomaton, trie: TokenTrie, bytewise: bool, budget: Budget) -> None:
        self._trie = trie
        self._bytewise = bytewise
        self._budget = budget
        self._bytes = automaton
        self._walk = TrieWalk(trie, automaton)
        self._lock = threading.Lock()
        self._mask_keys: dict[int, bytes] = {}
        self._masks: OrderedDict[bytes, MaskRow] = OrderedDict()
        self._steps: dict[tuple[int, int], int] = {}
        self._chains: dict[int, _Chain] = {}
        self._runs: OrderedDict[tuple[int, ...], tuple[int, ...]] = OrderedDict()
        self._completes: dict[int, bool] = {}

    @property
    def nbytes(self) -> int:
        masks = len(self._masks) * self._trie.vocabulary.mask_words * 4
        kept = 100 * (len(self._steps) + len(self._runs) + len(self._chains) + len(self._mask_keys))
        return self._bytes.nbytes + self._walk.nbytes + masks + kept

    @property
    def states(self) -> int:
        """States made so far."""
        return len(self._bytes)

    @property
    def masks(self) -> int:
        """Distinct masks kept."""
        return len(self._masks)

    def mask(self, state: int) -> MaskRow:
        """int32 [mask_words], read only: the tokens (EOS among them) allowed in this state."""
        with self._lock:
            key = self._mask_keys.get(state)
            found = self._masks.get(key) if key is not None else None
            if found is None:
                return self._new_mask(state)
            assert key is not None
            self._masks.move_to_end(key)
            return found

    def _new_mask(self, state: int) -> MaskRow:
        self._start()
        twin = self._bytes.within(state, self._trie.nodes.depth)
        key = self._bytes.signature(twin)
        mask = self._masks.get(key)
        if mask is None:
            nodes, states = self._walk.allowed(twin)
            if not self._bytewise:
                nodes = nodes[[self._complete(int(s)) for s in states]]
            mask = self._trie.pack(nodes, self._bytes.accepting(twin))
            mask.flags.writeable = False
            self._masks[key] = mask
            room = self._budget.limits.mask_cache_bytes // max(mask.nbytes, 1)
            while len(self._masks) > max(room, 1):
                self._masks.popitem(last=False)
        if len(self._mask_keys) >= self._budget.limits.states:
            self._mask_keys.clear()
        self._mask_keys[state] = key
        return mask

    def step(self, state: int, token: int) -> int:
        """The state after a token; 0 if it is not allowed (EOS and special tokens never are)."""
        reached = self._steps.get((state, token))
        if reached is None:
            with self._lock:
                self._start()
                reached = self._new_step(state, token)
                if len(self._steps) >= _STEPS_KEPT:
                    self._steps.clear()
                self._steps[state, token] = reached
        return reached

    def successors(self, state: int) -> tuple[LongArray, LongArray]:
        """Every token that is allowed (one of those with equal bytes), and the state after each; not kept."""
        with self._lock:
            self._start()
            nodes, states = self._walk.allowed(state)
            if not self._bytewise:
                kept = np.array([self._complete(s) for s in states.tolist()], np.bool_)
                nodes, states = nodes[kept], states[kept]
            return self._trie.token[nodes].astype(np.int64), states

    def _new_step(self, state: int, token: int) -> int:
        data = self._trie.data[token] if 0 <= token < len(self._trie.data) else b""
        reached = self._bytes.step(state, data) if data else DEAD
        return reached if reached == DEAD or self._bytewise or self._complete(reached) else DEAD

    def _complete(self, state: int) -> bool:
        """Can tokens lead from here to the end of a character? From there on the rest can be written."""
        if not self._bytes.inside_character(state):
            return True
        if state not in self._completes:
            seen, stack, found = {state}, [state], False
            while stack and not found:
                _, states = self._walk.allowed(stack.pop())
                for reached in set(states.tolist()) - seen:
                    found = (
                        found
                        or not self._bytes.inside_character(reached)
                        or bool(self._completes.get(reached))
                    )
                    seen.add(reached)
                    stack.append(reached)
            # If the search ends without success, nothing it saw leads anywhere.
            self._completes.update(dict.fromkeys([state] if found else seen, found))
        return self._completes[state]

    def accepting(self, state: int) -> bool:
        with self._lock:
            self._start()
            return self._bytes.accepting(state)

    def ends(self, state: int) -> bool:
        """Is there no token that leads on?"""
        with self._lock:
            self._start()
            return self._bytes.ends(state)

    def run(self, state: int, output: Sequence[int]) -> tuple[int, ...]:
        """Tokens that have no alternative in this state, after these output tokens."""
        with self._lock:
            edge = self._chains.get(state)
            if edge is None:
                self._start()
                edge = self._chains[state] = self._chain(state)
            if not edge.forced:
                return ()
            key = (state, *tail_of(self._trie, output))
            run = self._runs.get(key)
            if run is None:
                self._start()
                end = edge.end
                run = forced_run(
                    self._trie, output, edge.forced, lambda node: self._spans(end, node), edge.following
                )
                self._runs[key] = run
                if len(self._runs) > _RUNS_KEPT:
                    self._runs.popitem(last=False)
            return run

    def draft(self, state: int, output: Sequence[int]) -> tuple[int, ...]:
        """The bytes that are forced in this state as tokens, though these are not (see ``Matcher.draft``)."""
        with self._lock:
            edge = self._chains.get(state)
        return held_back(self._trie, output, edge.forced) if edge is not None and edge.forced else ()

    def begin(self, data: bytes) -> int:
        """The state after the first bytes of a text; 0 if no text begins so."""
        with self._lock:
            self._start()
            reached = self._bytes.step(START, data) if data else START
            return reached if reached == DEAD or self._bytewise or self._complete(reached) else DEAD

    def spanning(self, data: bytes) -> LongArray:
        """Ids of the tokens that begin with ``data`` and go on with what a text may begin with."""
        node = self._trie.nodes.find(data)
        if node <= 0:
            return np.zeros(0, np.int64)
        with self._lock:
            self._start()
            nodes, states = self._walk.allowed(START, node)
            if not self._bytewise:
                nodes = nodes[[self._complete(int(s)) for s in states]]
            return self._trie.tokens_at(nodes)

    def joint_run(self, output: Sequence[int], data: bytes) -> tuple[int, ...]:
        """Tokens that have no alternative after these output tokens, if ``data`` comes first and then a text."""
        with self._lock:
            self._start()
            edge = self._chains.get(START)
            if edge is None:
                edge = self._chains[START] = self._chain(START)
            following = edge.following if edge.forced else self._following(START)
            end = edge.end
            return forced_run(
                self._trie, output, data + edge.forced, lambda node: self._spans(end, node), following
            )

    def _chain(self, state: int) -> _Chain:
        data, end = chain(self._bytes, state, self._budget.limits.forced_bytes)
        if data and self._bytes.inside_character(end):
            data = data[: whole_characters(data)]
            end = self._bytes.step(state, data)
        return _Chain(data, end, self._following(end) if data else [])

    def _following(self, state: int) -> list[str]:
        """Characters that may come next: one of each kind in ASCII, one of each longer length in UTF-8."""
        kinds: dict[str, str] = {}
        for byte in self._bytes.live_bytes(state):
            kind = kind_of(chr(byte)) if byte < 0x80 else "2 bytes" if byte < 0xE0 else f"{byte >> 4:x}"
            if kind in kinds:
                continue
            data = bytes([byte])
            while self._bytes.inside_character(reached := self._bytes.step(state, data)):
                data += bytes(self._bytes.live_bytes(reached)[:1])
            kinds[kind] = data.decode()
        return list(kinds.values())

    def _spans(self, state: int, node: int) -> bool:
        if self._bytewise:
            return self._walk.any_allowed(state, node)
        _, states = self._walk.allowed(state, node)
        return any(self._complete(s) for s in np.unique(states).tolist())

    def _start(self) -> None:
        self._budget.start(self._budget.limits.mask_s)
