"""The parts of a step in a server, on the smallest batches."""

from __future__ import annotations

import pytest

from benchmark.whole_step import COLUMNS, measure_decode, measure_prefill
from trellis.runtime.executor import build_runner
from trellis.runtime.models import load_tokenizer, resolve_model_path

pytestmark = pytest.mark.model


def test_every_part_of_a_step_is_told_apart():
    tokenizer = load_tokenizer(resolve_model_path("smollm2-135m"))
    runner = build_runner("smollm2-135m", "float32", num_slots=2048, num_threads=1)
    decode = measure_decode(runner, tokenizer, 2048, requests=2, rounds=3)
    prefill = measure_prefill(runner, tokenizer, 2048, rounds=1)
    for row in (decode, prefill):
        assert set(COLUMNS) < set(row)
        assert all(row[name] > 0 for name in ("model", "sampling", "scheduling", "ipc", "detokenizing"))
    assert decode["filling"] > 0, "one of the two requests is constrained"
    assert prefill["filling"] == 0, "this one is not"
