"""Ranks that hold parts of a model compute what one process computes, and read no more than their parts.

In threads instead of processes: what the processes add is in ``test_two_processes.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from rank_fakes import Seat, ThreadGroup, in_threads, logits_of

from trellis.runtime.distributed.split import Part
from trellis.runtime.executor import ModelRunner
from trellis.runtime.models import load_model, resolve_model_path
from trellis.runtime.models.dequantize import dequantize
from trellis.runtime.models.gguf_file import GGUFTensor
from trellis.runtime.models.weights import SafetensorsSource, cut_blocks


def whole_logits(path: Path) -> torch.Tensor:
    runner = ModelRunner(load_model(path, torch.float32), 256, executor="torch")
    return logits_of(lambda extends: all_rows(runner, extends))


def all_rows(runner: ModelRunner, extends: list[Any]) -> torch.Tensor:
    rows = runner.forward(extends)
    return rows.take(range(len(rows)))


@pytest.mark.parametrize("size", [2, 4])
def test_logits_are_those_of_one_process(tiny: Any, size: int) -> None:
    def work(ranks: ThreadGroup) -> torch.Tensor:
        runner = ModelRunner(load_model(tiny.path, torch.float32, ranks=ranks), 256, executor="torch")
        return logits_of(lambda extends: all_rows(runner, extends))

    got, want = in_threads(size, work)[0], whole_logits(tiny.path)
    assert want.abs().max() > 1
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_in_three_parts() -> None:
    """Blocks of a GGUF file, cut by rows and by columns; 9 heads, of which 3 share a key head."""
    path = resolve_model_path("smollm2-135m")

    def work(ranks: ThreadGroup) -> torch.Tensor:
        runner = ModelRunner(load_model(path, torch.float32, ranks=ranks), 256, executor="torch")
        return logits_of(lambda extends: all_rows(runner, extends))

    got, want = in_threads(3, work)[0], whole_logits(path)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=0)
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_each_rank_has_keys_and_values_of_its_own_heads_only(tiny_llama: Any) -> None:
    whole = ModelRunner(load_model(tiny_llama.path, torch.float32), 64, executor="torch")
    part = ModelRunner(load_model(tiny_llama.path, torch.float32, ranks=Seat(1, 2)), 64, executor="torch")  # type: ignore[arg-type]
    assert [keys.numel() for keys in part.pool.keys] == [keys.numel() // 2 for keys in whole.pool.keys]


def test_no_more_is_read_than_the_part(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = SafetensorsSource._read

    def spy(*args: Any) -> torch.Tensor:
        values = original(*args)
        read.append(values.numel())
        return values

    monkeypatch.setattr(SafetensorsSource, "_read", spy)
    counts = []
    for ranks in (None, Seat(0, 4), Seat(3, 4)):
        read.clear()
        load_model(tiny_llama.path, torch.float32, ranks=ranks)  # type: ignore[arg-type]
        counts.append(sum(read))
    # Four ranks share two key heads: each reads half of the keys and values, and norms whole.
    assert all(count < counts[0] * 0.3 for count in counts[1:])


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_1", "Q8_0", "Q4_0", "Q6_K"])
def test_parts_of_blocks_are_parts_of_their_values(kind: str) -> None:
    quant = gguf.GGMLQuantizationType[kind]
    values, width = gguf.GGML_QUANT_SIZES[quant]
    rows, columns = 6, 4 * max(values, 32)
    random = np.random.default_rng(1)
    if kind == "Q6_K":  # the package cannot make it: any bytes will do, but for the scales
        data = random.integers(0, 60, rows * columns // values * width).astype(np.uint8)
    else:
        matrix = random.standard_normal((rows, columns)).astype(np.float32)
        data = np.frombuffer(gguf.quants.quantize(matrix, quant).tobytes(), np.uint8)
    tensor = GGUFTensor("x", (rows, columns), int(quant), data)
    whole = dequantize(tensor)
    half = columns // 2
    for part in (
        Part(0, ((2, 5),)),
        Part(0, ((4, 6), (0, 2))),
        Part(1, ((half, columns),)),
        Part(1, ((half, columns), (0, half))),
    ):
        cut, left = cut_blocks(tensor, part)
        want = torch.cat([whole.narrow(part.axis, a, b - a) for a, b in part.ranges], part.axis)
        assert left is None
        assert torch.equal(dequantize(cut), want)
        assert len(cut.data) * whole.numel() == len(data) * want.numel()


def test_a_part_that_ends_within_a_block_is_cut_from_the_values() -> None:
    tensor = GGUFTensor("x", (2, 64), int(gguf.GGMLQuantizationType.Q8_0), np.zeros(2 * 2 * 34, np.uint8))
    part = Part(1, ((0, 16),))
    assert cut_blocks(tensor, part) == (tensor, part)
