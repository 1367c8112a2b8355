"""Rotary scaling of every kind: frequencies, cosines and logits are those of transformers, also beyond the original context."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trellis.errors import ModelLoadError
from trellis.runtime.executor import ModelRunner
from trellis.runtime.executor.contract import Extend
from trellis.runtime.models import load_config, load_model
from trellis.runtime.models.config import ModelConfig, config_from_hf
from trellis.runtime.models.rope import RopeScaling, rope_from_gguf
from trellis.runtime.models.rotary import rotary_frequencies, rotary_of, rotary_scale

ORIGINAL = 64
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": ORIGINAL,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: dict[str, dict[str, object]] = {
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
    "llama3": {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 16},
    "yarn": YARN,
    "yarn of a large base": {**YARN, "rope_theta": 1000000.0, "factor": 2.5},
    "yarn with betas": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn not truncated": {**YARN, "truncate": False},
    "yarn with its own factor": {**YARN, "attention_factor": 0.8},
    "yarn with magnitudes": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn with one magnitude": {**YARN, "mscale": 0.7},
    "yarn of a short context": {**YARN, "original_max_position_embeddings": 8},
    "yarn of one place": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn that shrinks nothing": {**YARN, "factor": 1.0},
}


def hf_config(rope: dict[str, object], **changes: object) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**{**SIZES, **changes}, rope_parameters=dict(rope))


def read(config: transformers.PreTrainedConfig, **changes: object) -> ModelConfig:
    """As from the ``config.json`` that transformers writes."""
    data = json.loads(config.to_json_string(use_diff=False))
    return config_from_hf({**data, "architectures": ["LlamaForCausalLM"], **changes})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_frequencies_are_those_of_transformers(kind, head_dim):
    config = hf_config(KINDS[kind], head_dim=head_dim)
    want, scale = ROPE_INIT_FUNCTIONS[str(KINDS[kind]["rope_type"])](config, torch.device("cpu"))
    ours = read(config)
    torch.testing.assert_close(rotary_frequencies(ours), want, atol=0, rtol=1e-6)
    assert math.isclose(rotary_scale(ours), scale)


def test_yarn_takes_the_factor_from_the_contexts_where_it_is_not_named():
    data = {"type": "yarn", "original_max_position_embeddings": 16, "rope_theta": 10000.0}
    ours = read(hf_config(YARN), rope_parameters={**data, "factor": None})
    assert ours.rope_scaling is not None
    assert ours.rope_scaling.factor == ORIGINAL / 16
    assert ours.context_length == ORIGINAL


@pytest.mark.parametrize("kind", KINDS)
def test_the_older_spelling_says_the_same(kind):
    rope = dict(KINDS[kind])
    config = read(hf_config(rope))
    data = json.loads(hf_config(rope).to_json_string(use_diff=False))
    del data["rope_parameters"]
    theta = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    older = config_from_hf(
        {**data, "architectures": ["LlamaForCausalLM"], "rope_theta": theta, "rope_scaling": rope}
    )
    assert older == config


@pytest.mark.parametrize(
    ("rope", "changes", "length"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, {}, ORIGINAL),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}, {}, 3 * ORIGINAL),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, {}, 2 * ORIGINAL),
        (YARN, {}, 4 * ORIGINAL),
        (YARN, {"max_position_embeddings": 300}, 300),  # a file whose context is the stretched one already
        ({**LLAMA3, "rope_theta": 1e4, "original_max_position_embeddings": 16}, {}, ORIGINAL),
    ],
)
def test_the_context_is_the_stretched_one(rope, changes, length):
    assert read(hf_config(rope, **changes)).context_length == length


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "longrope", "factor": 2.0},
            "'longrope' is not supported; supported: default, linear, dyn",
        ),
        ({"rope_type": "linear", "factor": 0.0}, "factor must be positive, not 0"),
        ({"rope_type": "yarn", "factor": math.inf}, "factor must be positive, not inf"),
        ({"full_attention": {"rope_type": "default"}}, "differ by the kind of layer"),
        ({**YARN, "beta_fast": math.nan}, "beta_fast must be positive, not nan"),
        ({**YARN, "beta_slow": -1.0}, "beta_slow must be positive, not -1"),
        ({**LLAMA3, "low_freq_factor": math.inf}, "low_freq_factor must be positive, not inf"),
        (
            {**LLAMA3, "low_freq_factor": 4.0},
            "high_freq_factor must be more than low_freq_factor, 4.0, not 4.0",
        ),
        ({**YARN, "rope_theta": 1.0}, "theta must be more than 1, not 1"),
        ({"rope_type": "default", "rope_theta": math.nan}, "theta must be more than 1, not nan"),
        ({"rope_type": "linear", "factor": 1e300}, "the context must be from 1 to 2147483647 tokens"),
    ],
)
def test_scaling_that_cannot_be_run(rope, message):
    with pytest.raises(ModelLoadError, match=message):
        read(hf_config(YARN), rope_parameters=rope)


@pytest.mark.parametrize("executor", ["torch", "native"])
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "yarn not truncated", "yarn with magnitudes"])
def test_logits_up_to_the_whole_context(tiny_of, executor, kind):
    """A prompt of the full stretched context, in chunks, the rest of it from the cache."""
    tiny = tiny_of(hf_config(KINDS[kind]))
    length = load_config(tiny.path).context_length
    assert logits_error(tiny, executor, length, [0, length // 3, length - 1]) < 1e-4


@pytest.mark.parametrize("executor", ["torch", "native"])
@pytest.mark.parametrize(
    ("served", "length"), [(ORIGINAL, ORIGINAL), (ORIGINAL, 20), (None, 3 * ORIGINAL), (150, 150)]
)
def test_dynamic_scaling_equals_transformers_where_that_has_one_base(tiny_of, executor, served, length):
    """Served with the original context, every prompt; with a longer one, a prompt of just that length."""
    tiny = tiny_of(hf_config({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}))
    assert logits_error(tiny, executor, length, [0, length // 2], served) < 1e-4


def test_dynamic_scaling_has_one_base_for_all_lengths(tiny_of):
    """So what is cached of one prompt is right for another. Transformers computes a short prompt with another base."""
    tiny = tiny_of(hf_config({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}))
    assert logits_error(tiny, "torch", 20, [0], None) > 1e-3
    config = load_config(tiny.path)
    base, stretched = (rotary_frequencies(config.served_with(n)) for n in (ORIGINAL, 3 * ORIGINAL))
    assert base[0] == stretched[0]
    assert (base[1:] > stretched[1:]).all()
    want, _ = ROPE_INIT_FUNCTIONS["dynamic"](tiny.oracle.config, torch.device("cpu"), seq_len=3 * ORIGINAL)
    torch.testing.assert_close(stretched, want, atol=0, rtol=1e-6)


def logits_error(tiny, executor: str, length: int, starts: list[int], served: int | None = None) -> float:
    """The largest difference to transformers in a prompt that is computed in chunks from ``starts`` on."""
    tokens = np.random.default_rng(3).integers(0, SIZES["vocab_size"], length).astype(np.int32)
    slots = np.random.default_rng(4).permutation(np.arange(1, length + 1, dtype=np.int32))
    model = load_model(tiny.path, torch.float32, context_length=served)
    runner = ModelRunner(model, length, executor=executor)
    parts = []
    for start, end in zip(starts, [*starts[1:], length], strict=True):
        logits = runner.forward([Extend(tokens[start:end], start, slots[:end], 0)])
        parts.append(logits.take(range(len(logits))))
    want = tiny.logits(tokens.tolist())
    assert want.abs().max() > 1
    return float((torch.cat(parts) - want).abs().max())


def test_the_scale_is_of_cosines_and_sines():
    frequencies = torch.tensor([1.0, 0.1])
    plain = rotary_of(torch.arange(5), frequencies, torch.float32)
    scaled = rotary_of(torch.arange(5), frequencies, torch.float32, 1.5)
    for one, other in zip(plain, scaled, strict=True):
        torch.testing.assert_close(other, 1.5 * one)


class Metadata:
    """Of a GGUF file, by names without the architecture's."""

    path = Path("model.gguf")
    architecture = "llama"

    def __init__(self, values: dict[str, object]) -> None:
        self.values = values
        self.tensors: dict[str, object] = {}

    def get(self, key: str, default: object = None) -> object:
        return self.values.get(key, default)


def gguf_file(**scaling: object) -> Metadata:
    return Metadata(
        {"context_length": ORIGINAL, **{f"rope.scaling.{key}": value for key, value in scaling.items()}}
    )


def test_gguf_files_say_the_same_as_the_config_they_were_made_of():
    yarn = rope_from_gguf(gguf_file(type="yarn", factor=4.0, original_context_length=ORIGINAL))  # type: ignore[arg-type]
    want = read(hf_config(YARN))
    assert yarn.scaling == want.rope_scaling
    assert yarn.context_length == want.context_length
    linear = rope_from_gguf(gguf_file(type="linear", factor=3.0))  # type: ignore[arg-type]
    want = read(hf_config(KINDS["linear"]))
    assert linear.scaling == want.rope_scaling
    assert linear.context_length == want.context_length


def test_gguf_yarn_with_all_its_numbers():
    file = gguf_file(
        type="yarn",
        factor=4.0,
        original_context_length=16,
        attn_factor=0.5,
        yarn_beta_fast=8.0,
        yarn_beta_slow=2.0,
    )
    rope = rope_from_gguf(file)  # type: ignore[arg-type]
    assert rope.scaling is not None
    assert (rope.scaling.beta_fast, rope.scaling.beta_slow, rope.scaling.original_context) == (8.0, 2.0, 16)
    assert math.isclose(rope.scaling.attention_factor, 0.5 * (1 + 0.1 * math.log(4)))
    assert rope.context_length == ORIGINAL


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "longrope", "factor": 2.0}, "model.gguf: rotary scaling 'longrope' is not supported"),
        ({"type": "yarn", "factor": 2.0, "yarn_ext_factor": 0.0}, "yarn_ext_factor 0.0 is not supported"),
        ({"type": "yarn"}, "lacks llama.rope.scaling.factor"),
    ],
)
def test_gguf_scaling_that_cannot_be_run(scaling, message):
    with pytest.raises(ModelLoadError, match=message):
        rope_from_gguf(gguf_file(**scaling))  # type: ignore[arg-type]


def test_factors_are_one_a_frequency_and_positive():
    config = read(hf_config(YARN, head_dim=16))
    with pytest.raises(ModelLoadError, match="8 frequencies need as many rotary factors, not 7"):
        replace(config, rope_scaling=RopeScaling("factors", factors=(1.0,) * 7))
    with pytest.raises(ModelLoadError, match="each of the factors must be positive"):
        RopeScaling("factors", factors=(1.0, math.nan))


def test_dynamic_scaling_needs_more_than_one_frequency():
    with pytest.raises(ModelLoadError, match="needs a head_dim of 4 or more, not 2"):
        read(hf_config({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), head_dim=2)


def test_gguf_keys_are_those_of_the_format():
    keys = {
        value.partition(".")[2] for key, value in vars(gguf.Keys.Rope).items() if key.startswith("SCALING")
    }
    ours = ("type", "factor", "original_context_length", "attn_factor", "yarn_attn_factor", "yarn_ext_factor")
    assert {f"rope.scaling.{key}" for key in (*ours, "yarn_beta_fast", "yarn_beta_slow")} <= keys
