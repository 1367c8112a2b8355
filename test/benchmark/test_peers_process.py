"""An engine in a process of its own: it answers, fails alone, stands still between its turns, and ends with us."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from benchmark.peers.model_files import ModelFiles, prepare
from benchmark.peers.process import ROOT, EngineFailed, EngineProcess
from benchmark.peers.wire import Output, Request
from trellis.errors import ModelLoadError
from trellis.runtime.models import load_model
from trellis.runtime.models.gguf_file import read_gguf
from trellis.runtime.models.tokenizer import load_tokenizer

DRIVER = """
import sys, threading, time
from benchmark.peers.wire import Output, serve

class Fake:
    version = "fake 1"

    def __init__(self, settings):
        print("engines print what they like")
        if settings.get("broken"):
            sys.exit("the weights are gone")

    def run(self, requests):
        for each in requests:
            if each.max_tokens == 13:
                raise ValueError("thirteen")
            if each.max_tokens == 14:
                sys.exit("out of memory")
            if each.max_tokens == 15:
                time.sleep(60)
        return [Output("x" * each.max_tokens, each.max_tokens) for each in requests]

    def close(self):
        print("closed", file=sys.stderr)

serve(Fake)
"""

Start = Callable[..., EngineProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[EngineProcess] = []

    def start(timeout: float = 60.0, **settings: object) -> EngineProcess:
        command = [sys.executable, "-c", DRIVER, json.dumps({"threads": 1, **settings})]
        started.append(EngineProcess("fake", command, tmp_path / "fake.log", {}, timeout))
        return started[-1]

    yield start
    for each in started:
        each.close()


def state(pid: int) -> str:
    """One letter of /proc: T for a process that is stopped. Empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for(what: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_it_answers_and_stands_still_between_its_turns(start: Start) -> None:
    engine = start()
    pid = engine._process.pid
    assert engine.version == "fake 1"
    assert wait_for(lambda: state(pid) == "T")
    for _ in range(2):
        with engine.awake():
            seconds, outputs = engine.run([Request([1], 2), Request([1], 3)])
        assert seconds >= 0
        assert outputs == [Output("xx", 2), Output("xxx", 3)]
        assert wait_for(lambda: state(pid) == "T")
    engine.close()
    engine.close()
    assert not engine.alive


def test_an_error_fails_one_call_and_the_engine_lives_on(start: Start) -> None:
    engine = start()
    with engine.awake():
        with pytest.raises(EngineFailed, match="fake: ValueError: thirteen"):
            engine.run([Request([1], 13)])
        assert engine.run([Request([1], 1)])[1] == [Output("x", 1)]


def test_an_engine_that_ends_leaves_its_last_words(start: Start) -> None:
    engine = start()
    with (
        engine.awake(),
        pytest.raises(EngineFailed, match=r"fake has ended: out of memory \(all of it: .*fake\.log"),
    ):
        engine.run([Request([1], 14)])
    with pytest.raises(EngineFailed, match="the weights are gone"):
        start(broken=True)


def test_an_engine_that_does_not_answer_is_ended(start: Start) -> None:
    engine = start(timeout=1.0)
    with engine.awake(), pytest.raises(EngineFailed, match="did not answer within 1 s and was ended"):
        engine.run([Request([1], 15)])
    assert not engine.alive


@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not tell a process that its parent has ended"
)
def test_a_stopped_engine_ends_with_the_harness(tmp_path: Path) -> None:
    source = (
        "import sys, json, time; from pathlib import Path; from benchmark.peers.process import EngineProcess\n"
        "command = [sys.executable, '-c', sys.argv[1], json.dumps({'threads': 1})]\n"
        "engine = EngineProcess('fake', command, Path(sys.argv[2]), {}, 60.0)\n"
        "print(engine._process.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", source, DRIVER, str(tmp_path / "fake.log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        pid = int(harness.stdout.readline())
        assert wait_for(lambda: state(pid) == "T")
        os.kill(harness.pid, signal.SIGKILL)
    assert wait_for(lambda: state(pid) in ("", "Z"))


# The same weights for all


def write_tiny(path: Path) -> Path:
    """A Llama of two layers whose values bfloat16, float16 and Q8_0 all hold exactly."""
    rng = np.random.default_rng(0)
    hidden, inner, vocabulary = 64, 96, [*map(chr, range(0x100, 0x200)), "<|end|>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([1] * (len(vocabulary) - 1) + [3])
    writer.add_token_merges([])
    writer.add_eos_token_id(len(vocabulary) - 1)
    sizes = {"token_embd": (len(vocabulary), hidden), "output_norm": (hidden,)}
    for layer in range(2):
        shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
        shapes |= {"ffn_gate": (inner, 64), "ffn_up": (inner, 64), "ffn_down": (64, inner)}
        shapes |= {"attn_norm": (64,), "ffn_norm": (64,)}
        sizes |= {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
    for name, shape in sizes.items():
        values = (rng.integers(-126, 127, shape) / 16).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
            continue
        values[:, ::32] = 127 / 16  # the largest of each block, which so has the scale 1/16
        blocks = quantize(values, GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(path: Path) -> list[torch.Tensor]:
    weights = load_model(path, torch.float32).weights
    layers = [
        getattr(layer, name) for layer in weights.layers for name in ("qkv", "output", "gate_up", "down")
    ]
    return [weights.embedding, *layers, weights.norm]


def test_all_forms_of_the_weights_are_equal(tmp_path: Path) -> None:
    files = prepare(str(write_tiny(tmp_path / "tiny.gguf")), tmp_path / "cache")
    assert {
        each.type_id for name, each in read_gguf(files.gguf_f16).tensors.items() if "norm" not in name
    } == {1}
    given = tensors(files.gguf)
    for other in (files.gguf_f16, files.directory):
        for one, same in zip(given, tensors(other), strict=True):
            assert torch.equal(one, same)
    for path in (files.gguf_f16, files.directory):
        assert load_tokenizer(path).encode("a tree") == load_tokenizer(files.gguf).encode("a tree")


def test_transformers_computes_the_same_from_the_directory(tmp_path: Path) -> None:
    import transformers

    files = prepare(str(write_tiny(tmp_path / "tiny.gguf")), tmp_path / "cache")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(files.directory, dtype=torch.float32)
    config = load_model(files.directory, torch.float32).config
    assert (oracle.config.num_key_value_heads, oracle.config.rope_parameters["rope_theta"]) == (
        2,
        config.rope_theta,
    )
    assert torch.equal(
        oracle.model.embed_tokens.weight, load_model(files.gguf, torch.float32).weights.embedding
    )
    assert oracle.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False).shape == (1, 6)


def test_the_weights_are_written_once(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf")
    first = prepare(str(path), tmp_path / "cache")
    written = [each.stat().st_mtime_ns for each in (first.gguf_f16, first.directory)]
    assert prepare(str(path), tmp_path / "cache") == first
    assert [each.stat().st_mtime_ns for each in (first.gguf_f16, first.directory)] == written
    with pytest.raises(ModelLoadError, match="is a directory"):
        prepare(str(first.directory), tmp_path / "cache")


def test_every_form_has_its_name_in_the_settings() -> None:
    files = ModelFiles(Path("a"), Path("b"), Path("c"))
    assert files.as_settings() == {"gguf": "a", "gguf_f16": "b", "directory": "c"}
