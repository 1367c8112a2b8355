"""Token healing: a prompt that ends inside a token goes on as if it had not.

``http:`` is two tokens, and the model hardly ever saw ``//`` after the second of them, as ``://`` is a token of
its own. So the last tokens of the prompt are taken back, and what the model writes in their place must begin
with the bytes that were taken back: either the same tokens again, or at some point a token that begins with
what is left of these bytes and goes on past them. Where it goes on, the text begins.

The idea is from the guidance language (Lundberg, "Prompt boundaries and token healing", 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from trellis.fsm.contract import BeginsInside, Grammar, MaskRow, Matcher, Vocabulary
from trellis.fsm.longer_tokens import TokenIds, longer_tokens

_NONE: TokenIds = np.zeros(0, np.int64)
_PAIRS = 64  # longer tokens that are spelled together with a token before them, to see whether the two belong


class _Place(NamedTuple):
    """offset: how many of the bytes taken back are spelled again. kept: how many of the tokens taken back came
    again so far, or -1 once another token came; inside: that token, if it ended inside the bytes taken back."""

    offset: int
    kept: int
    inside: int = -1


class HealingMatcher:
    """A ``Matcher`` of the bytes taken back, and after them of the text.

    before: the prompt's tokens that stay, as far back as spelling matters. taken: the tokens taken back, each
        one ordinary text. exits: numbers of tokens, counted from the end of ``taken``, at which another token
        may come instead (the caller makes sure that the prompt without them is spelled as ``before`` is).
    grammar: what the text must satisfy; None: anything may follow. Then the matcher is of no use once
        ``pending`` is over.

    While bytes are pending EOS is not allowed. A token that ends inside the pending bytes and is not the one
    taken back is allowed only if the model's tokenizer spells it and a token after it, which goes past the
    bytes, as these two: else ``" "`` would do for the beginning of ``" independ"``, and is likely, but no text
    has ``independent`` after it. Where many tokens could follow it, it is not allowed.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        before: Sequence[int],
        taken: Sequence[int],
        exits: Sequence[int],
        grammar: Grammar | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._longer = longer_tokens(vocabulary)
        self._before = list(before)
        self._taken = list(taken)
        self._grammar = grammar
        pieces = [vocabulary.token_bytes[token] for token in taken]
        self._data = b"".join(pieces)
        self._starts = [0, *accumulate(map(len, pieces))]
        self._exits = frozenset(len(taken) - count for count in exits)  # places in ``taken``
        self._spans: dict[int, TokenIds] = {}  # by offset
        self._inside: dict[int, dict[int, TokenIds]] = {}  # by offset: see _pairs
        self._masks: dict[_Place, MaskRow] = {}
        self._tokens: list[int] = []
        self._places = [_Place(0, 0)]
        # What is left of the forced run at each place before the text; None: not worked out yet.
        self._runs: list[tuple[int, ...] | None] = [None]
        self._inner: Matcher | None = None
        self._inner_tokens = 0  # how many the inner matcher accepted
        self._ended = False  # by EOS, without a grammar

    @property
    def pending(self) -> bool:
        """Not all of the bytes taken back are spelled again."""
        return self._places[-1].offset < len(self._data)

    @property
    def settled(self) -> int:
        """How many of the tokens taken back have no alternative, from the first on: they need not be taken back."""
        return next((i for i in range(len(self._taken)) if self._open(i)), len(self._taken))

    def fill_mask(self, row: MaskRow) -> bool:
        if not self.pending:
            return self._inner is not None and self._inner.fill_mask(row)
        run = self._run()
        if run:
            row.fill(0)
            row.view(np.uint32)[run[0] >> 5] = 1 << (run[0] & 31)
        else:
            np.copyto(row, self._mask(self._places[-1]))
        return True

    def accept(self, token_id: int) -> bool:
        if not self.pending:
            return self._accept_text(token_id)
        run = self._run()
        if run and run[0] != token_id:
            return False
        place = self._places[-1]
        if not 0 <= token_id < self._vocabulary.size or not self._allows(place, token_id):
            return False
        reached = self._after(place, token_id)
        self._tokens.append(token_id)
        rest = run[1:] if run else ()
        if reached.offset >= len(self._data) and self._grammar is not None:
            self._inner = self._begin([*self._before, *self._tokens], reached.offset, rest)
            if self._inner is None:
                self._tokens.pop()
                return False
        self._places.append(reached)
        self._runs.append(rest or None)
        return True

    def forced(self) -> list[int]:
        if self.pending:
            return list(self._run())
        return self._inner.forced() if self._inner is not None else []

    def draft(self) -> list[int]:
        """The tokens taken back, as most often they come again."""
        if not self.pending:
            return self._inner.draft() if self._inner is not None else []
        kept = self._places[-1].kept
        return self._taken[kept:] if kept >= 0 and not self._run() else []

    def rollback(self, n: int) -> None:
        accepted = len(self._tokens) + self._inner_tokens
        if not 0 <= n <= accepted:
            raise ValueError(f"cannot take back {n} tokens: {accepted} were accepted")
        if n == 0:
            return
        self._ended = False
        inner = min(n, self._inner_tokens)
        if self._inner is not None and inner:
            self._inner.rollback(inner)
        self._inner_tokens -= inner
        if n > inner:
            back = n - inner
            del self._tokens[-back:], self._places[-back:], self._runs[-back:]
            self._inner = None

    def is_accepting(self) -> bool:
        if self.pending:
            return False
        return self._inner.is_accepting() if self._inner is not None else not self._ended

    def is_finished(self) -> bool:
        if self.pending:
            return False
        return self._inner.is_finished() if self._inner is not None else self._ended

    # -- the text ----------------------------------------------------------------------------------------------

    def _accept_text(self, token: int) -> bool:
        if self._inner is not None:
            if not self._inner.accept(token):
                return False
        elif self._ended or not 0 <= token < self._vocabulary.size:
            return False
        else:
            self._ended = token in self._vocabulary.eos_token_ids
        self._inner_tokens += 1
        return True

    def _begin(self, output: list[int], end: int, run: Sequence[int]) -> Matcher | None:
        """The text's own matcher, when ``output`` reaches ``end - len(data)`` bytes into the text."""
        grammar = self._grammar
        begun = b""
        if end > len(self._data):
            last = self._vocabulary.token_bytes[output[-1]]
            begun = last[len(last) - (end - len(self._data)) :]
        if isinstance(grammar, BeginsInside):
            return grammar.begun(output, begun, run)
        return grammar.matcher() if grammar is not None and not begun else None

    # -- the bytes taken back ------------------------------------------------------------------------------------

    def _after(self, place: _Place, token: int) -> _Place:
        same = 0 <= place.kept < len(self._taken) and token == self._taken[place.kept]
        offset = place.offset + len(self._vocabulary.token_bytes[token])
        if same:
            return _Place(offset, place.kept + 1)
        return _Place(offset, -1, token if offset < len(self._data) else -1)

    def _spanning(self, offset: int) -> TokenIds:
        """Tokens that begin with the pending bytes from ``offset`` on and go on with what the text may begin with."""
        found = self._spans.get(offset)
        if found is None:
            data = self._data[offset:]
            if self._grammar is None:
                found = self._longer.of(data)
            elif isinstance(self._grammar, BeginsInside) and self._longer.exist(data):
                found = self._grammar.spanning(data)
            else:
                found = _NONE
            self._spans[offset] = found
        return found

    def _pairs(self, offset: int) -> dict[int, TokenIds]:
        """Tokens that end inside the pending bytes from ``offset`` on, and for each those that may follow it."""
        found = self._inside.get(offset)
        if found is None:
            found = self._inside[offset] = {}
            for end in range(offset + 1, len(self._data)):
                for token in self._longer.exactly(self._data[offset:end]).tolist():
                    spans = self._spanning(end)
                    if 0 < len(spans) <= _PAIRS and token not in self._taken:
                        found[token] = spans[[self._belong(token, other) for other in spans.tolist()]]
            found = self._inside[offset] = {token: after for token, after in found.items() if len(after)}
        return found

    def _belong(self, first: int, second: int) -> bool:
        """Does the model's tokenizer spell the two as these two?"""
        spelled = self._vocabulary.token_bytes
        try:
            return self._vocabulary.encode((spelled[first] + spelled[second]).decode()) == [first, second]
        except UnicodeDecodeError:
            return False

    def _open(self, kept: int) -> bool:
        """May another token come instead of this one of those taken back?"""
        if kept not in self._exits:
            return False
        offset = self._starts[kept]
        return len(self._spanning(offset)) > 0 or bool(self._pairs(offset))

    def _mask(self, place: _Place) -> MaskRow:
        """int32 [mask_words], without regard to forced runs."""
        mask = self._masks.get(place)
        if mask is None:
            bits = np.zeros(self._vocabulary.mask_words * 32, np.uint8)
            if place.kept < 0:
                begin = place.offset - len(self._vocabulary.token_bytes[place.inside])
                bits[self._pairs(begin)[place.inside]] = 1
            else:
                bits[self._taken[place.kept]] = 1
                if place.kept in self._exits:
                    bits[self._spanning(place.offset)] = 1
                    bits[list(self._pairs(place.offset))] = 1
            mask = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
            self._masks[place] = mask
        return mask

    def _allows(self, place: _Place, token: int) -> bool:
        return bool(self._mask(place).view(np.uint32)[token >> 5] >> (token & 31) & 1)

    # -- forced runs -----------------------------------------------------------------------------------------------

    def _run(self) -> tuple[int, ...]:
        run = self._runs[-1]
        if run is None:
            run = self._runs[-1] = tuple(self._forced_run(self._places[-1]))
        return run

    def _forced_run(self, place: _Place) -> Iterator[int]:
        if place.kept >= 0 and not self._open(place.kept):
            yield from self._same_again(place)
            return
        run: Sequence[int] = ()
        if isinstance(self._grammar, BeginsInside):
            output = [*self._before, *self._tokens]
            run = self._grammar.joint_run(output, self._data[place.offset :])
        yield from run[: self._follows(place, run)]

    def _same_again(self, place: _Place) -> Iterator[int]:
        """The tokens taken back, as far as there is no alternative; if that is the end of them, what is forced then."""
        kept = place.kept
        while kept < len(self._taken) and not self._open(kept):
            yield self._taken[kept]
            kept += 1
        if kept == len(self._taken) and self._grammar is not None:
            output = [*self._before, *self._tokens, *self._taken[place.kept :]]
            text = self._begin(output, len(self._data), ())
            if text is not None:
                yield from text.forced()

    def _follows(self, place: _Place, run: Sequence[int]) -> int:
        """How many tokens of a run may be followed: as far as the masks go, and not into a dead end."""
        for count, token in enumerate(run):
            if not self._allows(place, token):
                return count
            place = self._after(place, token)
            if place.offset >= len(self._data):
                output = [*self._before, *self._tokens, *run[: count + 1]]
                return len(run) if self._begin(output, place.offset, run[count + 1 :]) is not None else count
        return len(run)
