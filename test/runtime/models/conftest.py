"""Tiny random models of each family, saved as transformers saves them, and the oracle's logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from trellis.runtime.executor import ModelRunner
from trellis.runtime.models import load_model

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-llama3-rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
    ),
    "llama-yarn-rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN_ROPE),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=7, head_dim=24),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-windows": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=24, tie_word_embeddings=True),
}


@dataclass(frozen=True)
class Tiny:
    """A model twice: as transformers runs it, and the directory that we load."""

    oracle: transformers.PreTrainedModel
    path: Path

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [T, vocab] of a whole prompt, by transformers."""
        return self.oracle(torch.tensor([token_ids])).logits[0]

    def runner(self, num_slots: int = 512) -> ModelRunner:
        return ModelRunner(load_model(self.path, torch.float32), num_slots)


def make_tiny(family: str, path: Path) -> Tiny:
    return make_tiny_of(FAMILIES[family](), path, seed=sum(map(ord, family)))


def make_tiny_of(config: transformers.PreTrainedConfig, path: Path, seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    oracle = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    # Larger than the usual start, so that logits spread and every term of the architecture shows in them.
    for name, parameter in oracle.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.15)
    oracle.eval().save_pretrained(path)
    return Tiny(oracle, path)


@pytest.fixture(scope="session", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def tiny_of(tmp_path: Path) -> Callable[[transformers.PreTrainedConfig], Tiny]:
    """Makes a model of a config, at most one a test."""
    return lambda config: make_tiny_of(config, tmp_path / "tiny")


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)
