"""What only a CUDA device can show of the runtime: graphs, overlap without waits, memory as planned."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from cuda_fakes import extend
from native_models import make_config, make_decoder
from scheduler_fakes import SIZE, Harness, choices, command

from trellis.errors import ModelLoadError
from trellis.runtime.cuda.build import DeviceSettings, build_device_runner
from trellis.runtime.cuda.device import CudaDevice
from trellis.runtime.cuda.memory import largest_extends
from trellis.runtime.cuda.runner import DeviceRunner
from trellis.runtime.kernels.launch import why_not
from trellis.runtime.models.decoder import Decoder, DecoderWeights, LayerWeights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
POOL = 4000


def on_device(model: Decoder, dtype: torch.dtype) -> Decoder:
    def moved(weights):
        parts = {field.name: getattr(weights, field.name) for field in dataclasses.fields(weights)}
        return {
            name: part.to("cuda", dtype) if isinstance(part, torch.Tensor) else part
            for name, part in parts.items()
        }

    layers = tuple(LayerWeights(**moved(layer)) for layer in model.weights.layers)
    return Decoder(model.config, DecoderWeights(**{**moved(model.weights), "layers": layers}))


def build(dtype: torch.dtype = torch.float32, vocab: int = SIZE, **settings) -> DeviceRunner:
    model = make_decoder(make_config(head_dim=64, hidden=128, vocab=vocab), torch.float32)
    given = {"num_slots": POOL, "graph_max": 16, **settings}
    return build_device_runner(on_device(model, dtype), DeviceSettings(**given))


@pytest.fixture
def strict() -> Iterator[Callable[[], None]]:
    """Once it was called, every wait for the device that is not named is an error."""
    if why_not(torch.device("cuda")) is not None:
        pytest.skip("torch's own attention waits when it plans; triton is not installed")
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_replayed_step_gives_the_logits_of_the_step_without(dtype):
    with_graphs, without = build(dtype), build(dtype, graph_max=0)
    rng, free = np.random.default_rng(0), iter(range(1, POOL))
    sequences = [
        (rng.integers(0, SIZE, n).tolist(), [next(free) for _ in range(n)]) for n in (5, 70, 1, 300, 33)
    ]
    prefill = [extend(tokens, 0, slots) for tokens, slots in sequences]
    for runner in (with_graphs, without):
        runner.forward(prefill)
    for count in (1, 3, 5, 2, 4):
        decodes = []
        for tokens, slots in sequences[:count]:
            tokens.append(int(rng.integers(0, SIZE)))
            slots.append(next(free))
            decodes.append(extend(tokens[-1:], len(tokens) - 1, slots))
        got, want = (runner.forward(decodes).take(range(count)) for runner in (with_graphs, without))
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-3)
    assert with_graphs.stats()["graph_steps"] == 5, with_graphs.stats()
    assert without.stats()["graph_steps"] == 0


def requests():
    return [
        *[command(f"greedy{i}", "sharedprefix"[: 3 + i], 30, ignore_eos=True) for i in range(5)],
        *[command(f"drawn{i}", "sharedprefix"[i:], 20, temperature=1.1, top_p=0.9, seed=i) for i in range(3)],
        command("choice", "abc", 12, constraint=choices("hello", "help", "hold")),
        command("penalised", "abe", 8, repetition_penalty=1.4, ignore_eos=True),
    ]


def answers(runner: DeviceRunner, overlap: bool, wanted) -> dict[str, list[int]]:
    harness = Harness(pool=POOL, overlap=overlap, rng=random.Random(1))
    harness.runner = harness.scheduler._runner = runner
    return {rid: answer.token_ids for rid, answer in harness.run(*wanted).items()}


def test_overlap_and_graphs_change_no_text_and_nothing_waits_without_a_name(strict):
    runners = [(build(graph_max=graphs), overlap) for graphs in (0, 16) for overlap in (False, True)]
    strict()
    texts = [answers(runner, overlap, requests()) for runner, overlap in runners]
    assert all(text == texts[0] for text in texts)


def test_log_probabilities_wait_by_name(strict):
    runner = build()
    strict()
    harness = Harness(pool=POOL, overlap=True)
    harness.runner = harness.scheduler._runner = runner
    answer = harness.run(command("r", "abc", 5, return_logprob=True, top_logprobs_num=3, ignore_eos=True))[
        "r"
    ]
    assert len(answer.logprobs) == 5
    assert runner.waits.counts["reports"] >= 5


@pytest.mark.parametrize("graph_max", [0, 32])
def test_memory_is_taken_as_planned(graph_max):
    chunk, running = 2048, 32
    runner = build(
        torch.bfloat16,
        32_000,
        num_slots=None,
        mem_fraction=0.5,
        chunk=chunk,
        running=running,
        graph_max=graph_max,
    )
    assert runner.plan is not None
    runner.forward(largest_extends(chunk, running, 500))
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    assert abs(total - free - runner.plan.planned) <= 0.03 * runner.plan.planned, runner.plan.describe()


def test_a_step_that_finds_no_memory_fails_its_requests_alone():
    runner = build()
    forward, calls = runner.step.forward, []

    def greedy_for_memory(extends):
        calls.append(1)
        if len(calls) == 3:
            torch.empty(2 * CudaDevice().total_memory(), dtype=torch.uint8, device="cuda")
        return forward(extends)

    runner.step.forward = greedy_for_memory
    harness = Harness(pool=POOL, overlap=True)
    harness.runner = harness.scheduler._runner = runner
    harness.scheduler.add([command("old", "abc", 9, ignore_eos=True)])
    for _ in range(3):
        harness.step()
    done = harness.run(command("new", "abcdef", 6, ignore_eos=True))
    assert (done["old"].finish.type, done["new"].finish.type) == ("error", "length")
    assert "out of memory" in done["old"].finish.message


def test_keys_and_values_of_8_bits():
    if torch.cuda.get_device_capability() < (8, 9):
        with pytest.raises(ModelLoadError, match=r"8\.9"):
            build(torch.bfloat16, kv_dtype="fp8_e4m3")
        return
    small, exact = build(torch.bfloat16, kv_dtype="fp8_e4m3"), build(torch.bfloat16)
    assert small.pool.keys[0].nbytes * 2 == exact.pool.keys[0].nbytes
    tokens = np.random.default_rng(0).integers(0, SIZE, 200).tolist()
    slots = list(range(1, 202))
    got, want = (
        (
            runner.forward([extend(tokens, 0, slots[:-1])]).take([0]),
            runner.forward([extend(tokens[:1], 200, slots)]).take([0]),
        )
        for runner in (small, exact)
    )
    for ours, theirs in zip(got, want, strict=True):
        assert torch.nn.functional.cosine_similarity(ours, theirs).item() > 0.98
