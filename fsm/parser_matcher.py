"""What the matchers over a native parser have in common: the accepted tokens, the runs under way, the kept mask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from trellis.fsm.contract import MaskRow, Vocabulary


class ParserMatcher(ABC):
    """A ``Matcher``. text: the bytes of each id, b"" for those that no constrained text may hold. before, run: see
    ``BeginsInside.begun``.

    The parser never sees EOS: whether the text may end is a question of its own.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        text: Sequence[bytes],
        before: Sequence[int] = (),
        run: Sequence[int] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._text = text
        self._before = list(before)
        self._output: list[int] = []  # without EOS
        # The forced run under way at each position; None: not worked out yet.
        self._runs: list[tuple[int, ...] | None] = [tuple(run) or None]
        self._mask: MaskRow | None = None
        self._ended = False

    @abstractmethod
    def _consume(self, token_id: int) -> bool:
        """Move the parser by a token; False if it does not allow it."""

    @abstractmethod
    def _take_back(self, n: int) -> None:
        """Move the parser back by the last n > 0 tokens, which are still in the output."""

    @abstractmethod
    def _complete(self) -> bool:
        """May the text end here?"""

    @abstractmethod
    def _compute_mask(self) -> MaskRow:
        """A new row, with EOS where the text may end."""

    @abstractmethod
    def _forced_run(self) -> tuple[int, ...]:
        """The tokens that have no alternative from here."""

    def fill_mask(self, row: MaskRow) -> bool:
        if self._ended:
            row.fill(0)
        elif run := self._run():
            row.fill(0)
            row.view(np.uint32)[run[0] >> 5] = 1 << (run[0] & 31)
        else:
            np.copyto(row, self.allowed())
        return True

    def accept(self, token_id: int) -> bool:
        if self._ended:
            return False
        if token_id in self._vocabulary.eos_token_ids:
            self._ended = self.is_accepting()
            return self._ended
        if not 0 <= token_id < len(self._text) or not self._text[token_id]:
            return False
        run = self._run()
        if run and run[0] != token_id:
            return False
        if not self._consume(token_id):
            return False
        self._output.append(token_id)
        self._runs.append(run[1:] or None)
        self._mask = None
        return True

    def forced(self) -> list[int]:
        return [] if self._ended else list(self._run())

    def rollback(self, n: int) -> None:
        accepted = len(self._output) + self._ended
        if not 0 <= n <= accepted:
            raise ValueError(f"cannot take back {n} tokens: {accepted} were accepted")
        back = n - self._ended if n else 0
        self._ended = self._ended and not n
        if back:
            self._take_back(back)
            del self._output[-back:], self._runs[-back:]
            self._mask = None

    def is_accepting(self) -> bool:
        return not self._ended and self._complete()

    def is_finished(self) -> bool:
        # A parser notices late that nothing can follow; the mask says so at once.
        return self._ended or (self.is_accepting() and np.array_equal(self.allowed(), self._only_eos()))

    def _only_eos(self) -> MaskRow:
        row = np.zeros(self._vocabulary.mask_words, np.uint32)
        for token in self._vocabulary.eos_token_ids:
            row[token >> 5] |= 1 << (token & 31)
        return row.view(np.int32)

    def allowed(self) -> MaskRow:
        """int32 [mask_words], read only, kept until the matcher moves: the mask without regard to forced runs."""
        if self._mask is None:
            self._mask = self._compute_mask()
        return self._mask

    def _run(self) -> tuple[int, ...]:
        run = self._runs[-1]
        if run is None:
            run = self._runs[-1] = self._forced_run()
        return run
