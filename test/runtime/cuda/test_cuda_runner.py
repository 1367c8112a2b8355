"""A runner with a device: what it samples, what it waits for, and what it does when a step fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_fakes import FakeDevice, extend, make_model

from trellis.errors import CapacityError, ModelLoadError
from trellis.runtime.cuda.build import DeviceSettings, build_device_runner, check_kv, kv_dtype
from trellis.runtime.cuda.waits import REASONS, Waits
from trellis.runtime.executor import ModelRunner
from trellis.runtime.executor.contract import NO_TOKEN, DeviceLost, SampleRow, launches
from trellis.runtime.executor.kv_pool import FP8, KVPool
from trellis.runtime.messages import SamplingParams

MODEL = make_model()
VOCAB = MODEL.config.vocab_size


def build(device: FakeDevice | None = None, **settings):
    given = {"attention": "torch", "ops": "torch", "num_slots": 64, "graph_max": 4, **settings}
    return build_device_runner(MODEL, DeviceSettings(**given), device or FakeDevice())


def rows(*params: SamplingParams, **more) -> list[SampleRow]:
    return [SampleRow(at, each, seed=at + 5, step=at, **more) for at, each in enumerate(params)]


def batch(count: int):
    return [extend([at + 1, 2 * at + 1], 0, [2 * at + 1, 2 * at + 2]) for at in range(count)]


PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.6),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=0.0, logit_bias={3: 50.0}),
)


def test_it_is_a_runner_that_launches_and_a_plain_one_is_not():
    assert launches(build())
    assert not launches(ModelRunner(MODEL, 8, executor="torch"))


@pytest.mark.parametrize("params", [PARAMS, PARAMS[:1] * 3, PARAMS[3:5]], ids=["mixed", "greedy", "limited"])
def test_it_samples_what_a_runner_on_a_cpu_samples(params):
    ours, plain = build(), ModelRunner(MODEL, 64, executor="torch")
    extends = batch(len(params))
    for seed in range(20):
        drawn = [SampleRow(at, each, seed=seed, step=at) for at, each in enumerate(params)]
        got = ours.sample_later(ours.forward(extends), drawn).result()
        assert got == plain.sample(plain.forward(extends), drawn)


def test_masks_penalties_and_forbidden_tokens_count():
    ours, plain = build(), ModelRunner(MODEL, 64, executor="torch")
    mask = np.full(-(-VOCAB // 32), 0b1010, np.int32)
    penalised = SamplingParams(temperature=0.0, repetition_penalty=1.7, frequency_penalty=0.3)
    drawn = rows(SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), penalised)
    drawn[0].mask = drawn[1].mask = mask
    drawn[1].forbidden = (1,)
    drawn[2].history = np.array([1, 1, 5, 70, 70], np.int32)
    got = ours.sample(ours.forward(batch(3)), drawn)
    assert got == plain.sample(plain.forward(batch(3)), drawn)
    assert all(mask[token // 32] >> token % 32 & 1 for token in got.token_ids[:2])
    assert got.token_ids[1] != 1


def test_rows_may_change_after_they_were_given():
    ours = build()
    drawn = rows(*PARAMS[:2])
    want = ours.sample(ours.forward(batch(2)), drawn).token_ids
    pending = ours.sample_later(ours.forward(batch(2)), drawn)
    for row in drawn:
        row.row, row.seed, row.step = 0, 999, 999
    assert pending.result().token_ids == want


def test_only_the_result_is_waited_for():
    device = FakeDevice()
    ours = build(device)
    device.log.clear()
    pending = ours.sample_later(ours.forward(batch(2)), rows(*PARAMS[1:3]))
    assert "wait" not in device.log
    assert device.log[-1] == "mark"
    pending.result()
    assert device.log[-1] == "wait"
    assert ours.stats()["waits"] == {"results": 1, "reports": 0, "failure": 0, "start": 1}


def test_the_next_step_reads_what_was_sampled_before_anybody_saw_it():
    ours, plain = build(), ModelRunner(MODEL, 64, executor="torch")
    pending = ours.sample_later(ours.forward(batch(3)), rows(*PARAMS[:3]))
    following = [
        extend([0], 2, [2 * at + 1, 2 * at + 2, 40 + at], follows=pending.places[at]) for at in (2, 0)
    ]
    got = ours.forward(following).take([0, 1])
    tokens = pending.result().token_ids
    plain.forward(batch(3))
    known = [extend([tokens[at]], 2, [2 * at + 1, 2 * at + 2, 40 + at]) for at in (2, 0)]
    torch.testing.assert_close(got, plain.forward(known).take([0, 1]))


def test_reports_are_waited_for_by_name():
    ours, plain = build(), ModelRunner(MODEL, 64, executor="torch")
    drawn = rows(PARAMS[0], PARAMS[1], want_logprob=True, top_logprobs_num=3)
    pending = ours.sample_later(ours.forward(batch(2)), drawn)
    want = plain.sample(plain.forward(batch(2)), drawn)
    assert pending.result().token_ids == want.token_ids
    assert pending.result().logprobs == pytest.approx(want.logprobs)
    assert list(pending.places) == []
    logits = ours.forward(batch(2))
    assert ours.score(logits, [0], [7], 2)[0] == pytest.approx(plain.score(logits, [0], [7], 2)[0])
    assert ours.waits.counts["reports"] == 2


def test_a_row_with_nothing_possible_gets_no_token():
    ours = build()
    nothing = np.zeros(-(-VOCAB // 32), np.int32)
    for params in PARAMS[:2]:
        assert ours.sample(ours.forward(batch(1)), rows(params, mask=nothing)).token_ids == [NO_TOKEN]


def test_nothing_to_sample_is_nothing():
    ours = build()
    assert ours.sample_later(ours.forward(batch(1)), []).result().token_ids == []


def test_out_of_memory_gives_memory_back_and_the_runner_goes_on():
    device = FakeDevice()
    ours = build(device)
    ours.recover(torch.OutOfMemoryError("CUDA out of memory"))
    assert device.log[-1] == "give back"
    assert ours.waits.counts["failure"] == 1
    device.log.clear()
    ours.recover(ValueError("something else"))
    assert "give back" not in device.log
    assert len(ours.forward(batch(1))) == 1


def test_a_device_that_is_lost_is_no_failure_of_one_step():
    device = FakeDevice()
    ours = build(device)
    device.broken = True
    with pytest.raises(DeviceLost, match="the device cannot go on: CUDA error: an illegal memory access"):
        ours.recover(RuntimeError("CUDA error"))
    assert not issubclass(DeviceLost, Exception)


def test_a_wait_needs_a_reason():
    waits = Waits(FakeDevice())
    with pytest.raises(KeyError), waits.named("because"):
        pass
    assert set(waits.counts) == set(REASONS)


def test_the_pool_takes_what_weights_and_the_largest_step_leave():
    token = 2 * MODEL.config.num_layers * MODEL.config.kv_size * 4
    device = FakeDevice(total=10_000_000, used=3_000_000, peak=1_000_000)
    ours = build(device, num_slots=None, mem_fraction=0.8, chunk=16, running=3)
    slots = (8_000_000 - 4_000_000) // token - 1
    assert ours.pool.slots == slots
    assert ours.plan is not None
    assert ours.plan.planned == 4_000_000 + (slots + 1) * token <= 8_000_000
    assert sum(t.nbytes for t in [*ours.pool.keys, *ours.pool.values]) == (slots + 1) * token
    assert f"K/V for {slots} tokens" in ours.plan.describe()


def test_a_device_that_the_weights_fill_is_refused():
    device = FakeDevice(total=10_000_000, used=8_900_000, peak=90_000)
    with pytest.raises(
        CapacityError, match=r"no room for a K/V pool on a fake: .*lower --chunked-prefill-size"
    ):
        build(device, num_slots=None, chunk=16, running=3)


def test_graphs_can_be_switched_off():
    ours = build(graph_max=0)
    ours.forward([extend([1], 0, [1])])
    assert ours.stats()["eager_steps"] == {"graphs are switched off": 1}
    assert ours.stats()["captured"] == []


def test_kv_dtypes():
    assert kv_dtype("auto", torch.bfloat16) == torch.bfloat16
    assert kv_dtype("fp8_e4m3", torch.bfloat16) == FP8
    with pytest.raises(ModelLoadError, match="K/V dtype 'int3' is unknown; known: auto, fp8_e4m3"):
        kv_dtype("int3", torch.bfloat16)
    check_kv("triton", torch.float32, FP8)
    check_kv("flashinfer", torch.bfloat16, FP8)
    for attention, model in (("torch", torch.bfloat16), ("flashinfer", torch.float16)):
        with pytest.raises(ModelLoadError, match=f"{attention!r} cannot read K/V of torch.float8"):
            check_kv(attention, model, FP8)


def test_what_is_too_large_for_8_bits_is_stored_as_the_largest():
    pool = KVPool(MODEL.config, 4, FP8)
    keys = torch.tensor([0.5, 448.0, 1e6, -1e6])[:, None, None].expand(-1, 2, 16)
    pool.store(1, torch.tensor([1, 2, 3, 4]), keys, -keys)
    assert pool.keys[1][1:, 0, 0].float().tolist() == [0.5, 448.0, 448.0, -448.0]
    assert pool.values[1][1:, 0, 0].float().tolist() == [-0.5, -448.0, -448.0, 448.0]
