"""Pages of 16 slots: the scheduler hands them out, and flashinfer's wrappers (a reference of them) read them whole."""

from __future__ import annotations

import random
from collections.abc import Callable

import flashinfer_reference
import pytest
import torch
from cuda_fakes import FakeDevice, make_model
from scheduler_fakes import SIZE, Harness, choices, command

from trellis.runtime.attention.base import AttentionShape
from trellis.runtime.attention.cascade import CascadeRule
from trellis.runtime.attention.flashinfer_backend import FlashInferAttention
from trellis.runtime.attention.paged_layout import MisalignedPages
from trellis.runtime.cuda import build
from trellis.runtime.cuda.build import DeviceSettings, build_device_runner
from trellis.runtime.cuda.memory import PoolPlan, largest_extends, largest_slots
from trellis.runtime.cuda.runner import DeviceRunner
from trellis.runtime.cuda.step import DeviceStep
from trellis.runtime.cuda.tokens import TokenTable
from trellis.runtime.cuda.warm_up import warm_up
from trellis.runtime.executor import KVPool, ModelRunner

MODEL = make_model(vocab=SIZE, seed=3)
POOL = 40 * 16 + 5
CONTEXT = 120
EAGER = CascadeRule(levels=3, min_keys=16, min_saved=0.0)


class CallingDevice(FakeDevice):
    """Its graphs call again what was captured: the reference looks at numbers, which no recorded graph can."""

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        body()

        def replay() -> None:
            self.replays += 1
            body()

        return replay


def flashinfer(shape: AttentionShape, pool: KVPool, rule: CascadeRule = EAGER) -> FlashInferAttention:
    return FlashInferAttention(shape, pool, flashinfer_reference, rule=rule)


def create(name: str, shape: AttentionShape, pool: KVPool) -> FlashInferAttention:
    """In the place of ``create_attention``."""
    assert name == "flashinfer"
    return flashinfer(shape, pool)


def device_runner(monkeypatch: pytest.MonkeyPatch, page_size: int, graphs: bool, slots: int) -> DeviceRunner:
    monkeypatch.setattr(build, "create_attention", create)
    settings = DeviceSettings(
        "flashinfer",
        "torch",
        num_slots=slots,
        context_length=CONTEXT,
        graph_max=8 if graphs else 0,
        page_size=page_size,
    )
    return build_device_runner(MODEL, settings, CallingDevice())


def harness(runner: DeviceRunner | ModelRunner, page_size: int, slots: int, **config: object) -> Harness:
    made = Harness(
        pool=slots,
        page_size=page_size,
        rng=random.Random(1),
        context_length=CONTEXT,
        chunked_prefill_size=21,
        **config,
    )
    made.runner = made.scheduler._runner = runner
    return made


def first() -> list:
    shared = "abcdefghijklmnopqrstuvwxyz" * 2
    return [
        *[command(f"fork{i}", shared[:40] + "xyz"[i], 25, ignore_eos=True) for i in range(3)],
        *[command(f"drawn{i}", shared[i:30], 9, temperature=1.2, seed=i) for i in range(3)],
        command("choice", shared[:18], 12, constraint=choices("helloworld", "help", "hold")),
        command("scored", shared[:20], 5, return_logprob=True, logprob_start=17, ignore_eos=True),
    ]


def second() -> list:
    """They go on with what the first ones left."""
    shared = "abcdefghijklmnopqrstuvwxyz" * 2
    return [command(f"again{i}", shared[: 33 + i], 6, ignore_eos=True) for i in range(4)]


def answers_of(running: Harness) -> dict[str, tuple[list[int], str, int]]:
    """Ids, why it ended, and cached tokens of each request."""
    running.run(*first())
    answers = running.run(*second())
    return {
        rid: (answer.token_ids, answer.finish.type, answer.counts.cached_tokens)
        for rid, answer in answers.items()
    }


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_answers_and_cached_tokens_are_those_of_the_torch_backend(monkeypatch, page_size, graphs, overlap):
    plain = ModelRunner(MODEL, POOL, attention="torch", executor="torch", page_size=page_size)
    want = answers_of(harness(plain, page_size, POOL, overlap=overlap))
    runner = device_runner(monkeypatch, page_size, graphs, POOL)
    running = harness(runner, page_size, POOL, overlap=overlap)
    assert answers_of(running) == want
    assert want["again0"][2] == 32
    assert runner.pool.slots == running.size
    assert (runner.step.graph_steps > 0) == graphs


def test_the_native_step_finds_the_rows_of_pages():
    plain, native = (
        ModelRunner(
            MODEL, POOL, attention="torch" if name == "torch" else "auto", executor=name, page_size=16
        )
        for name in ("torch", "native")
    )
    assert answers_of(harness(native, 16, POOL)) == answers_of(harness(plain, 16, POOL))


def test_answers_are_the_same_where_requests_have_to_give_way(monkeypatch):
    slots, tight = 10 * 16, {"output_share_start": 0.02, "output_share_floor": 0.01}
    plain = ModelRunner(MODEL, slots, attention="torch", executor="torch", page_size=16)
    want = answers_of(harness(plain, 16, slots, **tight))
    running = harness(device_runner(monkeypatch, 16, True, slots), 16, slots, **tight)
    assert answers_of(running) == want
    assert running.scheduler.counters.retractions > 0
    running.scheduler.flush_cache()
    assert running.free == slots


def test_slots_that_are_given_out_one_by_one_are_refused(monkeypatch):
    """So the tests above would not pass with a scheduler that knows of no pages."""
    running = harness(device_runner(monkeypatch, 16, False, 64), 1, 64)
    answer = running.run(command("r", "abc", 4))["r"]
    assert answer.finish.type == "error"
    assert MisalignedPages.__name__ in answer.finish.message


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_pool_is_sized_in_whole_pages(monkeypatch, page_size):
    """Measured with a step that is laid out in pages as well."""
    monkeypatch.setattr(build, "create_attention", create)
    device = FakeDevice(total=10_000_000, used=3_000_000, peak=1_000_000)
    settings = DeviceSettings(
        "flashinfer", "torch", mem_fraction=0.8, chunk=21, running=3, graph_max=0, page_size=page_size
    )
    runner = build_device_runner(MODEL, settings, device)
    token = 2 * MODEL.config.num_layers * MODEL.config.kv_size * 4
    plan, pool = runner.plan, runner.pool
    assert plan is not None
    assert pool.slots == plan.slots == (4_000_000 // token // page_size - 1) * page_size
    assert sum(t.nbytes for t in [*pool.keys, *pool.values]) == plan.planned - 4_000_000 <= 4_000_000


def test_no_pages_fit_where_there_is_no_memory():
    assert PoolPlan(1000, 0.5, 400, 200, token_bytes=1, page_size=16).slots == 0


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("chunk", "running"), [(1, 1), (16, 3), (21, 5)])
def test_each_request_of_the_largest_step_has_pages_of_its_own(page_size, chunk, running):
    extends = largest_extends(chunk, running, 100, page_size)
    assert [len(extend.token_ids) for extend in extends] == [chunk, *[1] * running]
    pages = [page for extend in extends for page in set((extend.slots // page_size).tolist())]
    assert len(set(pages)) == len(pages)
    assert min(pages) == 1
    assert (max(pages) + 1) * page_size == largest_slots(chunk, running, page_size) + page_size
    assert all(extend.slots[0] % page_size == 0 for extend in extends)


def test_warming_up_writes_to_the_page_of_the_sink_alone():
    pool, device = KVPool(MODEL.config, 64, torch.float32, page_size=16), FakeDevice()
    attention = flashinfer(AttentionShape.of(MODEL.config), pool, CascadeRule())
    with torch.inference_mode():
        warm_up(DeviceStep(MODEL, attention, device, TokenTable(256, device.where)), device)
    for stored in (*pool.keys, *pool.values):
        assert stored[:16].any()
        assert not stored[16:].any()
