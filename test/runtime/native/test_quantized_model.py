"""The default model, whose file has blocks of 4 and 8 bits, with quantised weights."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from benchmark.quantization import TEXT, Quality, quality
from trellis.runtime.executor import ModelRunner
from trellis.runtime.models import load_model, load_tokenizer, resolve_model_path
from trellis.runtime.models.blocks import read_blocks
from trellis.runtime.native.quantized import Quantization, read_quantization

pytestmark = pytest.mark.model

PATH = "smollm2-135m"
Q4_1, Q8_0 = GGMLQuantizationType["Q4_1"], GGMLQuantizationType["Q8_0"]


@pytest.fixture(scope="module")
def model():
    return load_model(resolve_model_path(PATH), torch.float32)


def test_blocks_are_the_weights(model):
    blocks = read_blocks(resolve_model_path(PATH), model.config)
    layers = model.config.num_layers
    assert Counter(kind for each in blocks.values() for kind in each.kinds) == {Q4_1: 4 * layers, Q8_0: 2}
    for layer in (0, layers - 1):
        for name in ("qkv", "output", "gate_up", "down"):
            want = getattr(model.weights.layers[layer], name).numpy()
            np.testing.assert_array_equal(dequantize(blocks[layer, name].rows().numpy(), Q4_1), want)
    head = blocks[0, "head"].rows().numpy()
    np.testing.assert_array_equal(dequantize(head, Q8_0), model.weights.head.numpy())


def test_quality_and_memory(model):
    """worse: by how much of the perplexity of float32. same: at least so many of the likeliest tokens. share: of the memory.

    Four bits are the file's own blocks, or made of the floats, as for a model that has no blocks.
    """
    path = resolve_model_path(PATH)
    token_ids = load_tokenizer(path).encode(TEXT.read_text(encoding="utf-8"))[:512]

    def measure(kept: Quantization) -> tuple[Quality, int]:
        runner = ModelRunner(model, 600, executor="native", num_threads=2, quantization=kept)
        return quality(runner, token_ids), runner.step.decoder.nbytes

    exact, full = measure(Quantization())
    for kept, worse, same, share in (
        (read_quantization("int8", path, model.config), 0.01, 0.93, 0.266),
        (read_quantization("file", path, model.config), 0.01, 0.94, 0.18),
        (Quantization("int4"), 0.03, 0.93, 0.18),
    ):
        got, size = measure(kept)
        assert abs(got.worse_than(exact)) <= worse, kept.name
        assert got.agreement(exact) >= same, kept.name
        assert size <= share * full, kept.name


def test_four_bits_of_this_file_are_its_own(model):
    path = resolve_model_path(PATH)
    for layer, name in ((0, "qkv"), (29, "down"), (0, "head")):
        matrix = torch.zeros(1)
        rows = [read_quantization(q, path, model.config).rows(layer, name, matrix) for q in ("int4", "file")]
        assert rows[0].kept == rows[1].kept == ("q8" if name == "head" else "q4")
        assert torch.equal(rows[0].data, rows[1].data)
