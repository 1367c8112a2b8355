"""Decode steps as graphs: which size is taken, what fills it up, and that it computes what the step does without."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from cuda_fakes import FakeDevice, FixedAttention, extend, fixed_attention, make_model
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis.runtime.attention.torch_reference import TorchAttention
from trellis.runtime.cuda.graphs import DecodeGraphs, graph_sizes
from trellis.runtime.cuda.runner import DeviceRunner
from trellis.runtime.cuda.step import DeviceStep
from trellis.runtime.cuda.tokens import TokenTable
from trellis.runtime.cuda.waits import Waits
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.executor.step import TorchStep

SLOTS = 400
MODEL = make_model()


class Bench:
    """A step with graphs over one pool, and the reference over another with the same contents."""

    def __init__(
        self, sizes=(1, 2, 4, 8), room: int = 512, longest=None, attention=FixedAttention, **device
    ) -> None:
        self.device = FakeDevice(**device)
        self.pool, self.reference_pool = (KVPool(MODEL.config, SLOTS, torch.float32) for _ in range(2))
        attention = fixed_attention(MODEL.config, self.pool, attention)
        self.tokens = TokenTable(64, self.device.where)
        self.graphs = DecodeGraphs(MODEL, attention, self.device, self.tokens, sizes, room, longest)
        self.step = DeviceStep(MODEL, attention, self.device, self.tokens, self.graphs)
        self.reference = TorchStep(MODEL, self.reference_pool, "torch")
        with torch.inference_mode():
            self.graphs.capture()

    @torch.inference_mode()
    def both(self, extends, reference=None):
        got = self.step.forward(extends)
        want = self.reference.forward(reference or extends)
        rows = range(len(want))
        assert len(got) == len(want)
        return got.take(rows), want.take(rows)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20)), (24, (1, 2, 4, 8, 16, 24))],
)
def test_sizes_grow_by_doubling_then_by_eight(most, sizes):
    assert graph_sizes(most) == sizes


@given(st.data())
@settings(max_examples=25)
def test_a_replayed_step_gives_the_logits_of_the_step_without(data):
    """Steps of any decodes, mixed with prefills between them, which write where later ones read."""
    bench = BENCH
    replays = bench.device.replays
    free = list(range(1, SLOTS + 1))
    sequences = []
    for _ in range(data.draw(st.integers(1, 8))):
        length = data.draw(st.integers(1, 20))
        sequences.append((np.random.default_rng(length).integers(0, 80, length).tolist(), []))
    prefill = []
    for tokens, slots in sequences:
        slots += [free.pop() for _ in tokens]
        prefill.append(extend(tokens, 0, slots))
    torch.testing.assert_close(*bench.both(prefill))
    for _ in range(data.draw(st.integers(1, 3))):
        chosen = [s for s in sequences if data.draw(st.booleans())] or sequences[:1]
        decodes = []
        for tokens, slots in chosen:
            tokens.append(data.draw(st.integers(0, 79)))
            slots.append(free.pop())
            decodes.append(extend(tokens[-1:], len(tokens) - 1, slots, data.draw(st.integers(0, 1))))
        if all(e.logits_from == 1 for e in decodes):
            decodes[0].logits_from = 0
        torch.testing.assert_close(*bench.both(decodes))
        replays += 1
    assert bench.device.replays >= replays
    for ours, theirs in zip(bench.pool.keys, bench.reference_pool.keys, strict=True):
        torch.testing.assert_close(ours[1:], theirs[1:])


def test_the_smallest_graph_that_holds_the_step_is_replayed_and_the_sink_fills_it_up():
    bench = Bench()
    planned = []
    plan = bench.step.attention.plan_graph
    bench.step.attention.plan_graph = lambda batch: (planned.append(batch), plan(batch))
    for count, size in ((1, 1), (2, 2), (3, 4), (5, 8), (8, 8)):
        before = bench.device.replays
        torch.testing.assert_close(*bench.both([extend([5], 0, [at + 1]) for at in range(count)]))
        assert bench.device.replays == before + 1
        batch = planned.pop()
        assert len(batch) == size
        assert batch.token_ids.tolist() == [5] * count + [0] * (size - count)
        assert batch.write_slots.tolist() == [*range(1, count + 1), *[0] * (size - count)]
        assert batch.slot_starts.tolist() == list(range(size + 1))
        assert batch.flat.starts.tolist() == [0] * size
    assert bench.step.graph_steps == 5
    assert bench.step.eager_steps == {}


def test_tensors_of_a_size_stay_where_they_are():
    bench = Bench()
    planned = []
    plan = bench.step.attention.plan_graph
    bench.step.attention.plan_graph = lambda batch: (planned.append(batch), plan(batch))
    for slot in (1, 2, 3):
        bench.both([extend([slot], 0, [slot])])
    for name in ("token_ids", "positions", "write_slots", "slot_starts", "query_starts", "slots"):
        assert len({getattr(batch, name).data_ptr() for batch in planned}) == 1, name


def test_a_token_that_follows_is_read_in_the_graph():
    bench = Bench()
    bench.tokens.put(torch.tensor([40, 41, 42]))
    got, want = bench.both(
        [extend([7], 0, [1]), extend([0], 0, [2], follows=2), extend([0], 0, [3], follows=0)],
        [extend([7], 0, [1]), extend([42], 0, [2]), extend([40], 0, [3])],
    )
    torch.testing.assert_close(got, want)
    assert bench.step.graph_steps == 1


def test_why_a_step_was_no_replay_is_counted():
    bench = Bench(sizes=(1, 2), room=40, longest=30)
    bench.both([extend([1, 2], 0, [1, 2])])
    bench.both([extend([1], 0, [1]), extend([1], 0, [2]), extend([1], 0, [3])])
    bench.both([extend([1], 30, list(range(1, 32)))])
    bench.both([extend([1], 29, list(range(1, 31))), extend([1], 10, list(range(40, 51)))])
    bench.both([extend([1], 29, list(range(1, 31)))])
    bench.both([extend([1], 29, list(range(1, 31))), extend([1], 9, list(range(40, 50)))])
    assert bench.step.stats() == {
        "graph_steps": 2,
        "captured": [1, 2],
        "eager_steps": {
            "an extend has several tokens": 1,
            "more extends than in the largest graph": 1,
            "more slots than the graphs have room for": 2,
        },
    }
    assert bench.device.replays == 2


def test_a_backend_that_cannot_is_named_as_the_reason():
    bench = Bench(attention=TorchAttention)
    torch.testing.assert_close(*bench.both([extend([1], 0, [1])]))
    assert "capture" not in bench.device.log
    assert list(bench.step.eager_steps) == [TorchAttention.no_graphs]


def test_a_capture_that_fails_leaves_steps_without_graphs(caplog):
    bench = Bench(fail_capture=2)
    torch.testing.assert_close(*bench.both([extend([1], 0, [1])]))
    [reason] = bench.step.eager_steps
    assert "capture failed: OutOfMemoryError" in reason
    assert "decode steps run without graphs" in caplog.text
    assert "give back" in bench.device.log
    assert bench.graphs.captured == ()


def test_the_largest_is_captured_first():
    """So that the memory which it needs serves all others."""
    order = []

    class Noting(FixedAttention):
        def plan_graph(self, batch):
            order.append(len(batch))
            self.plan(batch)

    Bench(sizes=(1, 2, 4), attention=Noting)
    assert order == [4, 2, 1]


def test_a_runner_that_was_released_holds_no_graph():
    """NCCL does not give up a group while there is a graph with its collectives."""
    bench = Bench(sizes=(1, 2))
    runner = DeviceRunner(
        MODEL.config, bench.pool, bench.step, bench.device, bench.tokens, Waits(bench.device)
    )
    runner.forward([extend([1], 0, [1])])
    assert bench.device.replays == 1
    replays = [weakref.ref(captured.replay) for captured in bench.graphs._captured.values()]
    runner.step = None  # as a group puts its own around the step
    runner.release()
    assert [replay() for replay in replays] == [None, None]
    assert bench.graphs.captured == ()


def test_reading_a_value_back_while_a_graph_is_recorded_is_an_error():
    """So the fake would see what a device does not allow."""

    class Peeking(FixedAttention):
        def read(self, q, layer):
            self.batch.slot_starts.max().item()
            return super().read(q, layer)

    bench = Bench(attention=Peeking)
    assert bench.graphs.captured == ()


BENCH = Bench()
