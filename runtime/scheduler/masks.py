"""The token masks of a step, filled while its forward pass runs.

Native engines and numpy release the interpreter lock, so a thread aside costs the forward pass next to nothing. It
alone touches the matchers until ``wait`` has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future

import numpy as np

from trellis.errors import TrellisError
from trellis.fsm.contract import Matcher, Vocabulary
from trellis.runtime.scheduler.buffer import IntArray
from trellis.runtime.scheduler.plan import PlannedExtend


class MaskFilling:
    """Begins to fill the masks of the constrained extends when it is made. Never raises: what goes wrong with a
    matcher is the ``fault`` of its extend."""

    def __init__(self, extends: Sequence[PlannedExtend], vocabulary: Vocabulary, aside: Executor) -> None:
        constrained = [e for e in extends if e.request.matcher is not None and e.sample]
        self._filled: Future[None] | None = None
        if constrained:
            self._filled = aside.submit(_fill, constrained, vocabulary)

    def wait(self) -> None:
        """Until all masks are there. Once a forward pass has begun this must be called, also if it fails."""
        if self._filled is not None:
            self._filled.result()


def _fill(extends: Sequence[PlannedExtend], vocabulary: Vocabulary) -> None:
    for extend in extends:
        matcher = extend.request.matcher
        assert matcher is not None
        try:
            first = _mask(matcher, vocabulary)
            if first is not None and not first.any():
                raise TrellisError(
                    f"the constraint allows no token at output token {extend.request.n_output}"
                )
            extend.masks = [first, *_masks_of_draft(matcher, extend.draft, vocabulary)]
        except Exception as error:
            extend.fault = error


def _masks_of_draft(matcher: Matcher, draft: Sequence[int], vocabulary: Vocabulary) -> list[IntArray | None]:
    """The mask after each token of the draft, as far as the matcher goes along. It stands where it stood."""
    masks: list[IntArray | None] = []
    accepted = 0
    try:
        for token in draft:
            if not matcher.accept(token):
                break
            accepted += 1
            if matcher.is_finished():
                break
            masks.append(_mask(matcher, vocabulary))
    except Exception:  # if the position is reached, it raises there again
        pass
    finally:
        matcher.rollback(accepted)
    return masks


def _mask(matcher: Matcher, vocabulary: Vocabulary) -> IntArray | None:
    row = np.zeros(vocabulary.mask_words, np.int32)
    return row if matcher.fill_mask(row) else None
