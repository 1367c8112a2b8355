from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

# The tests have no packages, so that their files need no unique names; what they share is loaded by its path.
if "runtime_fakes" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "runtime_fakes", Path(__file__).parents[1] / "manager" / "fakes.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["runtime_fakes"] = module
    spec.loader.exec_module(module)


@pytest.fixture
def scheduler() -> Any:
    from runtime_fakes import EchoScheduler

    return EchoScheduler()


@pytest.fixture
def engine_with(scheduler: Any) -> Callable[..., AbstractContextManager[Any]]:
    """An InProcessEngine on the echo scheduler, with some of its flags set."""
    from runtime_fakes import echo_build

    from trellis.runtime.config import ServerConfig
    from trellis.runtime.engine import InProcessEngine

    @contextmanager
    def make(**flags: Any) -> Iterator[Any]:
        flags = {"model_path": "echo", "max_running_requests": 8, "max_queued_requests": 8, **flags}
        with InProcessEngine(ServerConfig(**flags), echo_build(scheduler)) as engine:
            yield engine

    return make


@pytest.fixture
def engine(engine_with: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    with engine_with() as engine:
        yield engine


@pytest.fixture
def call(engine: Any) -> Callable[..., Any]:
    """One HTTP request to the application over ``engine``."""
    import asyncio

    import httpx

    from trellis.runtime.server.app import create_app

    app = create_app(engine)

    def send(method: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                if body is not None:
                    more["json"] = body
                return await client.request(method, path, **more)

        return asyncio.run(go())

    return send


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2 layers with random weights over bytes: real processes in a second, real tokens, no sense."""
    import json

    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("tiny")
    hidden, inner, layers, heads, vocab = 32, 64, 2, 2, 258
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 257,
    }
    (path / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        for name in ("q", "k", "v", "o"):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (hidden, hidden)
        for name in ("gate", "up"):
            shapes[f"{at}mlp.{name}_proj.weight"] = (inner, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    weights = {name: torch.randn(shape, generator=random) * 0.1 for name, shape in shapes.items()}
    save_file(weights, str(path / "model.safetensors"))
    return path
