"""What rank 0 tells the others is what it computes itself, in few bytes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis.runtime.distributed.wire import Step, StepDecoder, StepEncoder
from trellis.runtime.executor.contract import Extend


def same(one: Extend, other: Extend) -> bool:
    return (
        one.start == other.start
        and one.logits_from == other.logits_from
        and np.array_equal(one.token_ids, other.token_ids)
        and np.array_equal(one.slots, other.slots)
    )


@st.composite
def sessions(draw: st.DrawFn) -> list[list[Extend]]:
    """Steps of sequences that go on, go back, change places, and share slots; some are new."""
    sequences: list[list[int]] = []
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        step = []
        known = draw(st.permutations(sequences))[: draw(st.integers(0, 4))]
        begun = [list(draw(st.sampled_from(sequences))) if sequences and draw(st.booleans()) else []]
        for slots in [*known, *begun]:
            kept = draw(st.integers(0, len(slots))) if draw(st.booleans()) else len(slots)
            n = draw(st.integers(1, 3))
            slots[kept:] = draw(st.lists(st.integers(1, 5), min_size=n, max_size=n))
            tokens = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
            logits_from = draw(st.integers(0, n))
            step.append(Extend(np.array(tokens, np.int32), kept, np.array(slots, np.int32), logits_from))
        sequences = [list(extend.slots) for extend in step]
        steps.append(step)
    return steps


@given(sessions())
def test_the_others_get_the_same_extends(steps: list[list[Extend]]) -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    for extends in steps:
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(encoder.encode(extends)), type=Step)
        decoded = decoder.decode(message)
        assert len(decoded) == len(extends)
        assert all(map(same, decoded, extends))


def decode_of(slots: np.ndarray) -> Extend:
    return Extend(np.zeros(1, np.int32), len(slots) - 1, slots, 0)


def test_a_decode_sends_one_slot_wherever_its_request_stands_in_the_batch() -> None:
    encoder = StepEncoder()
    requests = [np.arange(1, 1000, dtype=np.int32) + 1000 * i for i in range(8)]
    encoder.encode([decode_of(slots) for slots in requests])
    longer = [np.append(slots, np.int32(9000 + i)) for i, slots in enumerate(requests)]
    message = encoder.encode([decode_of(slots) for slots in longer[::-1]])
    assert len(message.slots) == 4 * len(requests)


def test_what_the_scheduler_changes_afterwards_does_not_matter() -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    buffer = np.arange(1, 12, dtype=np.int32)
    decoder.decode(encoder.encode([decode_of(buffer[:10])]))
    buffer[:5] = 77  # the same place in memory is another request's now
    [extend] = decoder.decode(encoder.encode([decode_of(buffer[:11])]))
    assert np.array_equal(extend.slots, buffer)


def test_extends_that_contradict_themselves_are_not_sent() -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        StepEncoder().encode([Extend(np.zeros(1, np.int32), 5, np.ones(2, np.int32), 0)])
    with pytest.raises(ValueError, match="at least one extend"):
        StepEncoder().encode([])
