"""Graphs over Triton's attention and operations, in Triton's interpreter. Torch does not see such kernels, so that the fake
device calls the recorded function again: what this shows is that they find what they need in buffers that stay."""

from __future__ import annotations

import pytest
import torch
from cuda_fakes import FakeDevice, extend, make_model

from trellis.runtime.cuda.build import DeviceSettings, build_device_runner
from trellis.runtime.executor import ModelRunner
from trellis.runtime.executor.contract import SampleRow
from trellis.runtime.kernels.launch import why_not
from trellis.runtime.messages import SamplingParams

pytestmark = pytest.mark.skipif(
    why_not(torch.device("cpu")) is not None, reason=str(why_not(torch.device("cpu")))
)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_steps_with_triton_are_those_of_torch(kv_dtype):
    model = make_model(layers=1)
    plain = ModelRunner(make_model(layers=1), 64, executor="torch")
    settings = DeviceSettings("triton", "triton", kv_dtype, num_slots=64, graph_max=4)
    ours = build_device_runner(model, settings, FakeDevice(tape=False))
    assert (ours.step.attention.name, model.ops.name) == ("triton", "triton")

    def same(extends, known=None):
        rows = range(len(extends))
        got, want = ours.forward(extends).take(rows), plain.forward(known or extends).take(rows)
        if kv_dtype == "auto":
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        else:
            assert torch.nn.functional.cosine_similarity(got, want).min() > 0.95

    same([extend([3, 1, 4, 1, 5], 0, [1, 2, 3, 4, 5]), extend([9, 2], 0, [6, 7]), extend([6], 0, [8])])
    same([extend([5], 5, [1, 2, 3, 4, 5, 9]), extend([8], 1, [8, 10]), extend([7], 2, [6, 7, 11])])
    logits = ours.forward([extend([2], 0, [20])])
    pending = ours.sample_later(logits, [SampleRow(0, SamplingParams(temperature=1.0), seed=7, step=0)])
    [token] = pending.result().token_ids
    plain.forward([extend([2], 0, [20])])
    same([extend([0], 1, [20, 21], follows=pending.places[0])], [extend([token], 1, [20, 21])])
    assert ours.stats()["graph_steps"] == 3
    assert ours.stats()["captured"] == [1, 2, 4]
