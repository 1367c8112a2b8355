"""What automatic flags stand for on a GPU, decided without torch."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from trellis.errors import InvalidRequestError
from trellis.runtime import assembly
from trellis.runtime.config import ServerConfig, flag_of, parse_args
from trellis.runtime.cuda.choices import Machine, choose_device
from trellis.runtime.cuda.probe import Gpu, find_gpu, torch_cuda_version

HOPPER = Gpu("H200", (9, 0), 141 << 30)
TURING = Gpu("T4", (7, 5), 15 << 30)
NO_GPU, NO_CUDA = Machine(None, "13.0"), Machine(HOPPER, None)


def choose(gpu: Gpu | None = HOPPER, **flags: Any) -> ServerConfig:
    return choose_device(ServerConfig(model_path="m", **flags), Machine(gpu, "13.0"))


def test_a_gpu_that_torch_can_use_is_used():
    got = choose()
    assert (got.device, got.dtype, got.executor, got.overlap) == ("cuda", "bfloat16", "torch", True)
    assert got.cuda_graph_max_bs == got.max_running_requests == 128
    assert got.max_total_tokens is None, "the pool is sized by measuring"
    assert choose(max_running_requests=1000).cuda_graph_max_bs == 256
    assert choose(cuda_graph_max_bs=16).cuda_graph_max_bs == 16
    assert choose(dtype="float32").dtype == "float32"


def test_a_gpu_without_bfloat16_computes_in_float16():
    assert choose(TURING).dtype == "float16"


@pytest.mark.parametrize("machine", [NO_GPU, NO_CUDA, Machine(None, None)])
def test_without_one_everything_is_as_on_a_cpu(machine):
    got = choose_device(ServerConfig(model_path="m"), machine)
    assert got == ServerConfig(model_path="m", device="cpu", overlap=False)
    with pytest.raises(
        InvalidRequestError, match=r"device: cuda cannot be used: the (installed torch|driver)"
    ):
        choose_device(ServerConfig(model_path="m", device="cuda"), machine)


def test_overlap_is_as_it_was_asked_for():
    assert choose(overlap=False).overlap is False
    assert choose_device(ServerConfig(model_path="m", overlap=True), NO_GPU).overlap is True
    assert choose(tp_size=2).overlap is False
    with pytest.raises(InvalidRequestError, match="overlap: is for one rank"):
        choose(tp_size=2, overlap=True)
    for flag, value in (("--overlap", True), ("--no-overlap", False)):
        assert parse_args(["--model-path", "m", flag]).overlap is value
    assert parse_args(["--model-path", "m"]).overlap is None


@pytest.mark.parametrize(
    ("field", "flags"),
    [
        ("executor", {"executor": "native"}),
        ("quantization", {"quantization": "int8"}),
        ("deterministic", {"deterministic": True}),
    ],
)
def test_what_only_a_cpu_does_stays_there(field, flags, caplog):
    assert choose(**flags).device == "cpu"
    assert "steps are computed on the CPU, not on the H200" in caplog.text
    with pytest.raises(InvalidRequestError) as caught:
        choose(device="cuda", **flags)
    assert caught.value.field == field


def test_8_bit_keys_and_values_need_the_chip():
    assert choose(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8_e4m3"
    with pytest.raises(InvalidRequestError, match=r"capability 8\.9 or more, and the T4 has 7\.5"):
        choose(TURING, kv_cache_dtype="fp8_e4m3", dtype="float32")
    with pytest.raises(InvalidRequestError, match="fp8_e4m3 needs a GPU"):
        choose(kv_cache_dtype="fp8_e4m3", device="cpu")


def test_on_a_cpu_keys_and_values_are_of_the_models_type():
    model: Any = SimpleNamespace(num_layers=2, kv_size=16, context_length=64)
    given = {"model_path": "m", "device": "cpu", "dtype": "float32"}
    assert assembly.settle(ServerConfig(**given, kv_cache_dtype="float32"), model).max_total_tokens
    with pytest.raises(
        InvalidRequestError, match="kv_cache_dtype: is the dtype of the model on a CPU, float32"
    ):
        assembly.settle(ServerConfig(**given, kv_cache_dtype="bfloat16"), model)


def test_on_a_gpu_the_context_is_the_models_and_the_pool_is_left_open(monkeypatch):
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: Machine(HOPPER, "13.0")))
    model: Any = SimpleNamespace(num_layers=2, kv_size=16, context_length=64)
    got = assembly.settle(ServerConfig(model_path="m"), model)
    assert (got.device, got.max_total_tokens, got.context_length) == ("cuda", None, 64)
    asked = assembly.settle(ServerConfig(model_path="m", max_total_tokens=40), model)
    assert (asked.max_total_tokens, asked.context_length) == (40, 40)


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"mem_fraction_static": 1.0}, "mem_fraction_static"),
        ({"mem_fraction_static": 0.0}, "mem_fraction_static"),
        ({"cuda_graph_max_bs": 0}, "cuda_graph_max_bs"),
        ({"device": "tpu"}, "device"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype"),
    ],
)
def test_flags_that_make_no_sense_are_named(flags, field):
    with pytest.raises(InvalidRequestError) as caught:
        ServerConfig(model_path="m", **flags)
    assert caught.value.field == field
    assert flag_of(field).startswith("--")


class Driver:
    """The functions of libcuda that are asked, each with its arguments in order."""

    def __init__(self, count: int = 1, fails: str = "") -> None:
        self.count, self.fails = count, fails

    def cuInit(self, _flags: int) -> int:
        return int(self.fails == "cuInit")

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name: Any, length: int, _device: Any) -> int:
        name.value = b"NVIDIA H200"[: length - 1]
        return int(self.fails == "cuDeviceGetName")

    def cuDeviceGetAttribute(self, value: Any, attribute: int, _device: Any) -> int:
        value._obj.value = {75: 9, 76: 0}[attribute]
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, _device: Any) -> int:
        size._obj.value = 141 << 30
        return 0


def test_the_driver_is_asked_for_the_first_gpu():
    assert find_gpu(Driver()) == Gpu("NVIDIA H200", (9, 0), 141 << 30)
    assert find_gpu(Driver(count=0)) is None
    assert find_gpu(Driver(fails="cuInit")) is None
    assert find_gpu(Driver(fails="cuDeviceGetName")) is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0"),
        ('cuda = "12.8"\n', "12.8"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.1'\n", None),
        ("", None),
    ],
)
def test_the_cuda_of_torch_is_read_from_its_version_file(text, version, tmp_path):
    (tmp_path / "version.py").write_text(text)
    assert torch_cuda_version(tmp_path / "version.py") == version


def test_it_says_what_torch_says():
    import torch

    assert torch_cuda_version() == torch.version.cuda


def test_choosing_does_not_load_torch():
    code = (
        "import sys\n"
        "from trellis.runtime.config import ServerConfig\n"
        "from trellis.runtime.cuda.choices import choose_device\n"
        "choose_device(ServerConfig(model_path='m'))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
