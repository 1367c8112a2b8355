"""Decoders with quantised weights: what is kept how, what it costs in memory, what it computes, and clear refusals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from native_models import make_config, make_decoder
from quantized_oracle import multiply

from trellis.errors import InvalidRequestError, ModelLoadError
from trellis.runtime.config import ServerConfig
from trellis.runtime.executor import ModelRunner
from trellis.runtime.executor.contract import Extend
from trellis.runtime.models import Decoder, ModelConfig
from trellis.runtime.models.blocks import Blocks
from trellis.runtime.models.decoder import DecoderWeights
from trellis.runtime.models.gguf_file import GGUFTensor
from trellis.runtime.native.abi import Library
from trellis.runtime.native.decoder import NativeDecoder
from trellis.runtime.native.library import best_library
from trellis.runtime.native.quantized import Quantization, read_quantization

MATRICES = ("qkv", "output", "gate_up", "down")
EDGES = ("head", "embedding")


def wide_config(tied: bool = True) -> ModelConfig:
    """All matrices are wholes of blocks and groups."""
    return make_config(head_dim=32, hidden=128, intermediate=256, vocab=512, tied=tied)


def prompt(n: int, vocab: int) -> list[Extend]:
    tokens = np.random.default_rng(0).integers(0, vocab, n).astype(np.int32)
    return [Extend(tokens, 0, np.arange(1, n + 1, dtype=np.int32), 0)]


def logits(model: Decoder, quantization: str = "none", executor: str = "native") -> torch.Tensor:
    runner = ModelRunner(model, 64, executor=executor, num_threads=2, quantization=Quantization(quantization))
    return runner.forward(prompt(24, model.config.vocab_size)).take(range(24))


def as_kept(library: Library, model: Decoder, quantization: str) -> Decoder:
    """The model with its weights as the quantised one has them."""
    chosen = Quantization(quantization)

    def kept(layer: int, name: str, matrix: torch.Tensor) -> torch.Tensor:
        rows = chosen.rows(layer, name, matrix)
        inputs = matrix.shape[1]
        x = np.ones((1, inputs), np.float32)
        return torch.from_numpy(multiply(library, rows.kept, rows.source, matrix.numpy(), inputs, x).weights)

    w = model.weights
    layers = tuple(
        dataclasses.replace(layer, **{name: kept(i, name, getattr(layer, name)) for name in MATRICES})
        for i, layer in enumerate(w.layers)
    )
    head = kept(0, "head", w.head)
    embedding = head if model.config.tied_head else kept(0, "embedding", w.embedding)
    return Decoder(model.config, DecoderWeights(embedding, layers, w.norm, head))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@torch.inference_mode()
def test_computes_the_decoder_of_the_weights_that_it_keeps(quantization, tied):
    """What is left is that products read activations of 8 bits."""
    library = best_library()
    model = make_decoder(wide_config(tied), torch.float32)
    got = logits(model, quantization)
    want = logits(as_kept(library, model, quantization), executor="torch")
    error = (got - want).norm() / want.norm()
    assert 1e-6 < error < 0.03
    assert (want - logits(model, executor="torch")).norm() / want.norm() > error  # the weights matter more


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8.5), ("int4", 5.0)])
def test_only_the_quantised_weights_are_kept(quantization, bits, odd):
    """A group of 32 has a half, or two; groups and blocks that are not whole are filled up."""
    config = make_config(head_dim=24, hidden=70, intermediate=96, vocab=320) if odd else wide_config()
    model = make_decoder(config, torch.float32)
    decoder = NativeDecoder(best_library(), model, 1, Quantization(quantization))
    plain = NativeDecoder(best_library(), model, 1)
    c = config
    per_layer = c.hidden_size * (2 * c.query_size + 2 * c.kv_size + 3 * c.intermediate_size)
    expected = (c.num_layers * per_layer * bits + c.vocab_size * c.hidden_size * 8.5) / 8
    small = 4 * c.hidden_size * (2 * c.num_layers + 1)  # norms
    if odd:
        assert expected < decoder.nbytes - small < 1.6 * expected
    else:
        assert decoder.nbytes == expected + small
    assert decoder.nbytes < plain.nbytes / 2


def blocks_of(kind: str, *shapes: tuple[int, int]) -> Blocks:
    number = GGMLQuantizationType[kind]
    parts = tuple(
        GGUFTensor(
            "x", shape, number, quantize(np.random.randn(*shape).astype(np.float32), number).reshape(-1)
        )
        for shape in shapes
    )
    return Blocks(parts, (0,) * len(parts))


def mixed(*blocks: Blocks) -> Blocks:
    return Blocks(tuple(p for b in blocks for p in b.parts), tuple(h for b in blocks for h in b.heads))


FILE = {
    (0, "qkv"): blocks_of("Q4_1", (64, 64), (32, 64), (32, 64)),
    (0, "output"): blocks_of("Q4_0", (64, 64)),
    (0, "gate_up"): mixed(blocks_of("Q4_1", (96, 64)), blocks_of("Q8_0", (96, 64))),
    (0, "down"): blocks_of("Q5_0", (64, 96)),
    (1, "down"): blocks_of("Q8_0", (64, 96)),
    (0, "head"): blocks_of("Q8_0", (320, 64)),
    (0, "embedding"): blocks_of("Q4_0", (320, 64)),
}


@pytest.mark.parametrize(
    ("quantization", "kept"),
    [
        ("none", "own own own own own own own own"),
        ("int8", "q8 q8 q8 q8 q8* q8 q8* q8"),
        ("int4", "q4* q4* q4 q4 q4 q4 q8* q4*"),
        ("file", "q4* q4* q8 q8 q8* own q8* q4*"),
    ],
)
def test_what_is_kept_how(quantization, kept):
    """With a star: the file's own blocks, not made of floats."""
    places = [*((0, name) for name in MATRICES), (1, "down"), (1, "qkv"), (0, "head"), (0, "embedding")]
    chosen = Quantization(quantization, FILE)
    found = []
    for layer, name in places:
        rows = chosen.rows(layer, name, torch.zeros(8, 64))
        found.append(rows.kept + ("*" if rows.data.dtype == torch.uint8 else ""))
    assert " ".join(found) == kept


def test_blocks_of_joined_parts_stand_row_by_row():
    q, k, v = FILE[0, "qkv"].parts
    rows = FILE[0, "qkv"].rows().numpy()
    assert rows.shape == (128, 64 // 32 * 20)
    np.testing.assert_array_equal(rows.reshape(-1), np.concatenate([q.data, k.data, v.data]))


@pytest.mark.parametrize("refused", [{"executor": "torch"}, {"attention": "torch"}])
def test_torch_does_not_compute_with_quantised_weights(tiny_model, refused):
    with pytest.raises(ModelLoadError, match="quantization 'int8' is for the native executor, not for"):
        ModelRunner(tiny_model, 32, quantization=Quantization("int8"), **refused)


def test_without_a_compiler_a_quantization_is_refused(tiny_model, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ModelLoadError,
        match=r"quantization 'int4' needs the native executor, which cannot be used: .*'no-such-compiler'.*"
        "quantization 'none' runs on torch",
    ):
        ModelRunner(tiny_model, 32, quantization=Quantization("int4"))


def test_a_model_that_the_kernels_do_not_know_is_refused(tiny_model):
    wide = make_decoder(tiny_model.config, torch.float64)
    with pytest.raises(
        ModelLoadError, match="needs the native executor, which cannot be used: it computes in"
    ):
        ModelRunner(wide, 32, quantization=Quantization("int8"))


def test_names_are_checked(tmp_path):
    config = make_config()
    with pytest.raises(ModelLoadError, match="quantization 'int3' is unknown; known: none, int8, int4, file"):
        read_quantization("int3", tmp_path, config)
    with pytest.raises(ModelLoadError, match=r"holds no quantised weights.*take int8 or int4"):
        read_quantization("file", tmp_path, config)
    assert read_quantization("int4", tmp_path, config).blocks == {}
    with pytest.raises(InvalidRequestError, match=r"quantization.*must be one of none, int8, int4, file"):
        ServerConfig("smollm2-135m", quantization="int3")
    with pytest.raises(InvalidRequestError, match=r"quantization.*executor.*torch"):
        ServerConfig("smollm2-135m", quantization="int8", executor="torch")
