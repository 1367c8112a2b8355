"""Decode steps as graphs: what a step launches is recorded once for some numbers of requests, and replayed with one call.

A step of one token a request launches the same kernels every time; only the numbers in its index tensors differ. So these lie
in a buffer that never moves, and a step is: fill the buffer (one copy), replay. A number of requests that was not captured
takes the next larger graph, with extends that read and write the sink slot in the places left over.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from trellis.runtime.attention.base import AttentionBackend
from trellis.runtime.cuda.device import Device, Replay
from trellis.runtime.cuda.staging import Parts, Staging, layout
from trellis.runtime.cuda.tokens import TokenTable
from trellis.runtime.executor.batch import Arrays, Batch
from trellis.runtime.executor.contract import Extend
from trellis.runtime.models.decoder import Decoder

STEP = 8  # requests from one captured number to the next, above 8
MOST_SLOTS = 1 << 24  # in the buffer: 64 MiB

# What an extend of the padding is: one token that stands at position 0 of a sequence of its own, in the sink slot.
SINK = Extend(np.zeros(1, np.int32), 0, np.zeros(1, np.int32), 0)

logger = logging.getLogger(__name__)


def graph_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, … and ``most``, which is at least 1: padding is never more than doubling, or 7 requests."""
    sizes = {1, 2, 4, *range(STEP, most + 1, STEP), most}
    return tuple(sorted(size for size in sizes if size <= most))


@dataclass(frozen=True)
class _Captured:
    """The graph of one number of extends. places: where the parts of a batch lie in the buffer. batch: the same as tensors."""

    places: list[slice]
    batch: Batch
    replay: Replay


class DecodeGraphs:
    """sizes: numbers of extends, rising. room: most slots of all extends of a step, padding included. longest: most slots of one
    extend, if there is less room for few extends than for many."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        device: Device,
        tokens: TokenTable,
        sizes: Sequence[int],
        room: int,
        longest: int | None = None,
    ) -> None:
        self.sizes = tuple(sizes)
        self._most_slots = min(room, MOST_SLOTS)
        self._longest = longest or self._most_slots
        self._model, self._attention, self._device, self._tokens = model, attention, device, tokens
        self._staging = Staging(device)
        self._captured: dict[int, _Captured] = {}
        self._refused = attention.no_graphs
        most = max(self.sizes)
        places = self._places(most)
        self._border = places[len(Parts.of([SINK]).wide)].start
        size = places[-1].stop
        self._ints = torch.zeros(size, dtype=torch.int32, device=device.where)
        self._wide = torch.zeros(self._border, dtype=torch.int64, device=device.where)
        self._hidden = torch.zeros((most, model.config.hidden_size), dtype=model.dtype, device=device.where)

    def capture(self) -> None:
        """All sizes, the largest first, so that the others find its memory. A failure is logged, and no graph is used then."""
        if self._refused is not None:
            logger.info("decode steps run without graphs: %s", self._refused)
            return
        began = time.monotonic()
        try:
            for size in tqdm(self.sizes[::-1], desc="capturing decode graphs", disable=None, leave=False):
                self._captured[size] = self._capture(size)
        except Exception as error:
            self._captured.clear()
            self._refused = f"their capture failed: {type(error).__name__}: {error}"
            logger.warning("decode steps run without graphs, as their capture failed", exc_info=error)
            self._device.give_back()
        else:
            seconds = time.monotonic() - began
            logger.info(
                "%d decode graphs, up to %d requests, %.1f s", len(self.sizes), self.sizes[-1], seconds
            )

    def refuse(self, reason: str) -> None:
        """Use none from here on, for a reason that its user should know."""
        self.drop(reason)
        logger.warning("decode steps run without graphs: %s", reason)

    def drop(self, reason: str) -> None:
        """Free them all, and use none from here on."""
        self._captured.clear()
        self._refused = reason

    @property
    def captured(self) -> tuple[int, ...]:
        """Numbers of extends that have a graph."""
        return tuple(sorted(self._captured))

    def why_not(self, extends: Sequence[Extend]) -> str | None:
        """Why a step of these extends cannot be a replay; None if it can."""
        if self._refused is not None:
            return self._refused
        if any(len(extend.token_ids) != 1 for extend in extends):
            return "an extend has several tokens"
        if len(extends) > self.sizes[-1]:
            return "more extends than in the largest graph"
        size = self._fitting(len(extends))
        if sum(len(extend.slots) for extend in extends) + size - len(extends) > self._room(size):
            return "more slots than the graphs have room for"
        return self._attention.no_graph_for(extends)

    def run(self, extends: Sequence[Extend]) -> tuple[Tensor, Tensor | None]:
        """Hidden states [B, hidden] of these extends, for which ``why_not`` gave no reason, and which rows' logits are wanted:
        int64 [R], or None for all. The states stay until the next call."""
        count = len(extends)
        size = self._fitting(count)
        captured = self._captured[size]
        parts = Parts.of([*extends, *[SINK] * (size - count)])
        rows = parts.arrays.logits_rows
        self._fill(parts, captured)
        self._attention.plan_graph(dataclasses.replace(captured.batch, flat=parts.flat))
        captured.replay()
        if len(rows) == size:
            return self._hidden[:count], None
        wanted = len(rows) - (size - count)
        return self._hidden[:count], captured.batch.logits_rows[:wanted]

    def _room(self, size: int) -> int:
        """Slots of a step of so many extends."""
        return max(size, min(self._most_slots, size * self._longest))

    def _fitting(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)

    def _capture(self, size: int) -> _Captured:
        parts = Parts.of([SINK] * size)
        places = self._places(size)
        wide = [self._wide[place] for place in places[: len(parts.wide)]]
        narrow = [self._ints[place] for place in places[len(parts.wide) :]]
        *first, follows = wide
        batch = Batch(parts.flat, *first, *narrow)
        captured = _Captured(places, batch, lambda: None)
        self._fill(parts, captured)
        self._attention.plan_graph(batch)
        replay = self._device.capture(self._body(batch, follows))
        return dataclasses.replace(captured, replay=replay)

    def _body(self, batch: Batch, follows: Tensor) -> Callable[[], None]:
        """What is recorded."""

        def body() -> None:
            token_ids = self._tokens.fill_in(batch.token_ids, follows)
            hidden = self._model.forward(token_ids, batch.positions, self._attention)
            self._hidden[: len(batch)].copy_(hidden)

        return body

    def _fill(self, parts: Parts, captured: _Captured) -> None:
        """Wanted rows may be fewer than extends: their part is filled up."""
        rows = np.zeros(len(parts.flat.lengths), np.int32)
        rows[: len(parts.arrays.logits_rows)] = parts.arrays.logits_rows
        *wide, slots = (*parts.wide, *parts.narrow)
        wide[Arrays._fields.index("logits_rows")] = rows
        *places, slots_place = captured.places
        slots_place = slice(slots_place.start, slots_place.start + len(slots))
        self._staging.send((*wide, slots), (*places, slots_place), self._ints)
        self._wide.copy_(self._ints[: self._border])

    def _places(self, size: int) -> list[slice]:
        """Of each part for ``size`` extends; the slots, which are the last, have their room."""
        parts = Parts.of([SINK] * size)
        lengths = [len(array) for array in (*parts.wide, *parts.narrow)]
        return layout([*lengths[:-1], self._room(size)])
