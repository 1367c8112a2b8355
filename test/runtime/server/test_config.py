"""Flags, and the numbers put in place of automatic values."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from trellis.errors import InvalidRequestError
from trellis.runtime import assembly
from trellis.runtime.config import ServerConfig, flag_of, parse_args


def model(**changes: Any) -> Any:
    shape = {"num_layers": 30, "kv_size": 192, "context_length": 8192, **changes}
    return SimpleNamespace(**shape)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set what the machine seems to have."""

    def seem(free: int, cpu: str = "", limit: str = "", used: str = "") -> None:
        files = {
            "/proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {free // 1024} kB\n",
            "/proc/cpuinfo": f"flags : sse {cpu}\n",
            "/sys/fs/cgroup/memory.max": limit,
            "/sys/fs/cgroup/memory.current": used,
        }
        monkeypatch.setattr(assembly, "_read", files.__getitem__)

    return seem


def test_every_field_is_a_flag() -> None:
    values: dict[type, Any] = {int: "7", float: "0.5", str: "x", bool: None}
    for each in fields(ServerConfig):
        if each.metadata.get("choices"):
            given = each.metadata["choices"][-1]
        elif each.name == "schedule_policy":  # open: also module:attribute
            given = "fcfs"
        else:
            given = values[each.metadata["type"]]
        argv = [] if each.name == "model_path" else ["--model-path", "m"]
        config = parse_args([*argv, flag_of(each.name), *([] if given is None else [given])])
        expected = True if given is None else each.metadata["type"](given)
        assert getattr(config, each.name) == expected


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRELLIS_API_KEY", "sesame")
    assert parse_args(["--model-path", "m"]).api_key == "sesame"
    assert parse_args(["--model-path", "m", "--api-key", "other"]).api_key == "other"
    assert ServerConfig(model_path="m").api_key is None


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"port": -1}, "--port"),
        ({"page_size": 0}, "--page-size"),
        ({"page_size": 17, "max_total_tokens": 16}, "--page-size"),
        ({"num_threads": 1025}, "--num-threads"),
        ({"executor": "native", "attention_backend": "torch"}, "--attention-backend"),
        ({"max_running_requests": 0}, "--max-running-requests"),
        ({"dtype": "int3"}, "--dtype"),
        ({"schedule_policy": "luck"}, "--schedule-policy"),
        ({"context_length": 20, "max_total_tokens": 10}, "--context-length"),
    ],
)
def test_values_that_make_no_sense_name_their_field_or_flag(
    flags: dict[str, Any], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ServerConfig(model_path="m", **flags)
    assert flag_of(caught.value.field) == named
    argv = [part for name, value in flags.items() for part in (flag_of(name), str(value))]
    with pytest.raises(SystemExit):
        parse_args(["--model-path", "m", *argv], "some command")
    printed = capsys.readouterr().err
    assert printed.startswith("some command: error: ")
    assert f"{named}: " in printed


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", "80"), ("page_size", 1.0), ("model_path", None), ("disable_jump_forward", 1), ("host", None)],
)
def test_python_values_of_another_type_name_their_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be of the type") as caught:
        ServerConfig(**{"model_path": "m", name: value})
    assert caught.value.field == name


def test_the_help_says_what_the_policies_do() -> None:
    [text] = [each.metadata["help"] for each in fields(ServerConfig) if each.name == "schedule_policy"]
    assert "fcfs: first come, first served" in text
    assert "lpm: longest prefix match first" in text


def test_what_was_asked_for_is_kept() -> None:
    asked = ServerConfig(
        model_path="m",
        dtype="float32",
        device="cpu",
        overlap=False,
        num_threads=3,
        context_length=1000,
        max_total_tokens=5000,
    )
    assert assembly.settle(asked, model()) == asked


def test_the_dtype_follows_the_processor(machine: Any) -> None:
    machine(1 << 40)
    assert assembly.settle(ServerConfig(model_path="m"), model()).dtype == "float32"
    machine(1 << 40, cpu="avx512f amx_bf16")
    assert assembly.settle(ServerConfig(model_path="m"), model()).dtype == "bfloat16"


def test_an_ample_pool_holds_four_full_contexts(machine: Any) -> None:
    machine(1 << 40)
    settled = assembly.settle(ServerConfig(model_path="m"), model())
    assert (settled.max_total_tokens, settled.context_length) == (4 * 8192, 8192)
    assert settled.num_threads is not None
    assert settled.num_threads >= 1


def test_little_memory_makes_a_small_pool_and_a_shorter_context(machine: Any) -> None:
    size = 2 * 30 * 192 * 4
    machine(4 * size * 1000)
    settled = assembly.settle(ServerConfig(model_path="m"), model())
    assert (settled.max_total_tokens, settled.context_length) == (1000, 1000)


def test_a_pool_is_whole_pages(machine: Any) -> None:
    machine(1 << 40)
    asked = ServerConfig(model_path="m", max_total_tokens=1000, page_size=16)
    settled = assembly.settle(asked, model())
    assert (settled.max_total_tokens, settled.context_length) == (992, 992)


def test_a_context_that_was_asked_for_gets_its_pool(machine: Any) -> None:
    machine(1 << 20)
    settled = assembly.settle(ServerConfig(model_path="m", context_length=2000), model())
    assert (settled.max_total_tokens, settled.context_length) == (2000, 2000)


def test_a_control_group_limits_the_memory(machine: Any) -> None:
    machine(1 << 40, limit="1000000", used="400000")
    assert assembly.free_memory() == 600_000
    machine(1 << 30, limit="max", used="5")
    assert assembly.free_memory() == 1 << 30


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="context_length: the model's context is 8192"):
        assembly.settle(ServerConfig(model_path="m", context_length=9000), model())
