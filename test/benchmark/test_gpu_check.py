"""The check of the GPU executor, run with a CPU that behaves like a device: it works, and it notices what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmark.gpu import kernels
from benchmark.gpu.check import SECTIONS, Check, Scale, big_model, main
from benchmark.gpu.checkout import stand_in
from benchmark.gpu.driving import ONE_OFF, Ask, Driver, vocabulary
from benchmark.gpu.kernels import check_kernels, check_ops
from benchmark.gpu.models import llama_3_8b, product_weights, random_decoder, tiny
from benchmark.gpu.report import FAILED, MISSED, OK, SKIPPED, Line, Report
from benchmark.gpu.texts import SHEET, check_texts
from trellis.runtime import messages
from trellis.runtime.attention.torch_reference import TorchAttention
from trellis.runtime.executor.model_runner import ModelRunner
from trellis.runtime.kernels.ops import TritonOps
from trellis.runtime.models.ops import TorchOps

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test/runtime/cuda"))
sys.path.insert(0, str(ROOT / "test/runtime/native"))

from cuda_fakes import FakeDevice  # noqa: E402

CPU = torch.device("cpu")
TOKENS = 4000  # of the pool, as planned
TOKEN_BYTES = 512  # of the tiny model in float32


def decoder(seed: int = 0):
    return random_decoder(tiny(), torch.float32, CPU, seed)


def torch_runner(seed: int = 0) -> ModelRunner:
    return ModelRunner(decoder(seed), 2048, "torch", "torch")


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter, which these tests have, would take minutes for a text."""
    monkeypatch.setattr("trellis.runtime.cuda.build.why_not", lambda where: f"not on {where}")


@pytest.mark.usefixtures("without_kernels")
def test_every_section_runs_and_the_report_is_written(tmp_path: Path) -> None:
    device = FakeDevice(total=int((TOKENS + 1.5) * TOKEN_BYTES / 0.85))
    report = Report({"device": "a fake"}, budget_s=600)
    check = Check(report, device, Scale.of(small=True), decoder, ["torch"])
    check.run(["texts", "speed"])
    device.used = check.runner.plan.planned
    check.run(["memory", "ablations"])
    report.write(tmp_path / "report.json")
    found = json.loads((tmp_path / "report.json").read_text())
    assert [line for line in report.lines if line.status == FAILED] == []
    assert set(found["seconds"]) == set(SECTIONS) - {"kernels", "tests"}
    names = {line["name"]: line for line in found["lines"]}
    assert names["slots of the pool"]["value"] == TOKENS
    assert names["difference between taken and planned"]["status"] == OK
    assert names["torch: all on, and the torch reference"]["note"] == "6 of 6 alike"
    assert names["time without ÷ with jump-forward"]["value"] > 0


def test_kernels_are_compared_with_the_reference() -> None:
    report = Report({}, budget_s=600)
    check_kernels(report, CPU, [torch.float32], small=True)
    status = {line.name: line.status for line in report.lines}
    assert status["attention flashinfer, float32"] == SKIPPED
    assert [name for name in status if status[name] != OK] == ["attention flashinfer, float32"]
    assert sum(name.startswith("attention triton") for name in status) == 2


def test_a_kernel_that_computes_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchOps, "gate", lambda _, gate_up: gate_up.chunk(2, dim=-1)[1])
    report = Report({}, budget_s=600)
    check_ops(report, CPU, TritonOps(), torch.float32, small=True)
    assert [line.status for line in report.lines] == [FAILED, FAILED, OK]


def test_a_result_that_is_no_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(TorchAttention):
        def read(self, q: torch.Tensor, layer: int) -> torch.Tensor:
            out = super().read(q, layer)
            out[-1] = torch.nan
            return out

    monkeypatch.setattr(kernels, "create_attention", lambda _, shape, pool: Broken(shape, pool))
    report = Report({}, budget_s=600)
    kernels.check_attention(report, CPU, "broken", torch.float32, small=True)
    assert {line.status for line in report.lines} == {FAILED}


def test_a_model_that_computes_something_else_is_noticed() -> None:
    report = Report({}, budget_s=600)
    check_texts(report, Driver(torch_runner(0), 2048, 8, 512, 2048), torch_runner(1), True, "broken")
    wrong = [line.name for line in report.lines if line.status == FAILED]
    assert wrong == ["broken: all on, and the torch reference"]


@pytest.mark.usefixtures("without_kernels")
def test_memory_beyond_the_plan_is_a_missed_bar() -> None:
    device = FakeDevice(total=int((TOKENS + 1.5) * TOKEN_BYTES / 0.85))
    report = Report({}, budget_s=600)
    check = Check(report, device, Scale.of(small=True), decoder, ["torch"])
    device.used = int(1.05 * check.runner.plan.planned)
    check.run(["memory"])
    assert report.lines[-1].status == MISSED


def test_a_section_that_fails_does_not_end_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report({}, budget_s=600)

    def broken() -> None:
        raise ValueError("no such kernel")

    report.run("kernels", broken)
    report.run("speed", lambda: report.figure("speed", "copy", 1.0, "TB/s"))
    assert [line.status for line in report.lines] == [FAILED, "measured"]
    assert "no such kernel" in report.lines[0].note
    assert report.failed
    assert "no such kernel" in capsys.readouterr().err


def test_no_section_begins_when_the_time_is_spent() -> None:
    report = Report({}, budget_s=-1.0)
    report.run("speed", lambda: pytest.fail("it was run"))
    assert report.lines[0].status == SKIPPED
    assert "--budget" in report.lines[0].note


def test_without_a_gpu_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main([], ["--output", str(tmp_path / "report.json")]) == 2
    assert "nothing was checked" in capsys.readouterr().err
    assert not (tmp_path / "report.json").exists()


def test_a_line_of_the_table() -> None:
    line = Line("speed", "decode", MISSED, 0.6543, "", ">= 0.7", "8 ms")
    assert str(line).split() == ["speed", "decode", "missed", "0.6543", "bar", ">=", "0.7", "8", "ms"]


def test_forced_runs_save_passes_and_change_no_token() -> None:
    driver = Driver(torch_runner(), 2048, 8, 512, 2048)
    asks = [Ask([65, 66, 67], 120, SHEET)]
    on, _ = driver.run(asks)
    off, _ = driver.run(asks, ONE_OFF["jump_forward"])
    assert on[0].token_ids == off[0].token_ids
    assert on[0].forward_passes < off[0].forward_passes


def test_the_vocabulary_spells_any_text() -> None:
    made = vocabulary(1024)
    text = 'The {"name": "zoë"} of 3 abcs\n'
    assert b"".join(made.token_bytes[token] for token in made.encode(text)) == text.encode()


def test_the_shape_of_the_big_model_is_the_published_one() -> None:
    config = llama_3_8b()
    embedding = config.vocab_size * config.hidden_size
    norms = config.hidden_size * (2 * config.num_layers + 1)
    assert product_weights(config) + embedding + norms == 8_030_261_248


@pytest.mark.model
def test_a_model_can_be_named() -> None:
    assert big_model("smollm2-135m", CPU).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name", ["SamplingParams", "Constraint", "GenerateCommand", "FinishReason", "Counts", "TokenOutput"]
)
def test_messages_without_msgspec_are_the_same(name: str) -> None:
    """The stand-in makes what msgspec makes."""
    source = (ROOT / "runtime/messages.py").read_text()
    made = {"__name__": "messages_without_msgspec"}
    kept = sys.modules["msgspec"]
    sys.modules["msgspec"] = stand_in()
    module = type(sys)("messages_without_msgspec")
    sys.modules["messages_without_msgspec"] = module
    try:
        made = vars(module)
        exec(compile(source, "messages.py", "exec"), made)
    finally:
        sys.modules["msgspec"] = kept
        del sys.modules["messages_without_msgspec"]
    needed = {
        "GenerateCommand": {"rid": "a", "token_ids": [1], "params": None},
        "TokenOutput": {"rid": "a", "token_ids": [1], "counts": None},
        "Constraint": {"kind": "regex", "source": "a+"},
        "FinishReason": {"type": "stop"},
    }.get(name, {})
    real, ours = getattr(messages, name)(**needed), made[name](**needed)
    assert {field: getattr(ours, field) for field in real.__struct_fields__} == {
        field: getattr(real, field) for field in real.__struct_fields__
    }
    again = made[name](**needed)
    for field in real.__struct_fields__:
        if field not in needed and isinstance(getattr(ours, field), list):
            assert getattr(ours, field) is not getattr(again, field)


def test_tests_that_need_a_gpu_are_found_and_run(tmp_path: Path) -> None:
    """In a process of its own, as pytest runs in pytest only so."""
    folder = tmp_path / "test"
    folder.mkdir()
    (folder / "test_without.py").write_text("def test_no(): assert False\n")
    (folder / "test_with.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "def test_left(): pytest.skip('one GPU is too few')\n"
    )
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from benchmark.gpu.device_tests import run_device_tests\n"
        "from benchmark.gpu.report import Report\n"
        "report = Report({}, 60); run_device_tests(report, Path(sys.argv[2]))\n"
        "print([(line.status, line.name, line.note) for line in report.lines], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    lines = eval(done.stderr.splitlines()[-1])
    assert lines == [
        (FAILED, "test/test_with.py::test_bad", ""),
        (SKIPPED, "test/test_with.py::test_left", "Skipped: one GPU is too few"),
        (OK, "tests that need a GPU", "1 passed, 1 failed"),
    ]


HIDDEN = "msgspec zmq rpyc llguidance fastapi uvicorn gguf pydantic outlines_core xgrammar"
PLAIN = f"""
import importlib.abc, importlib.util, sys

HIDDEN = set("{HIDDEN}".split())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in HIDDEN else real(name, package)

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path[:] = [Hide()] + [each for each in sys.meta_path if "editable" not in repr(each).lower()]
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from benchmark.gpu.checkout import make_importable
print(len(make_importable(Path(sys.argv[1]))))
import benchmark.gpu.check, trellis.radix
print(trellis.radix.__file__)
"""


def test_a_checkout_that_was_not_installed_can_be_imported_with_torch_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(ROOT)], capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", str(ROOT / "radix/__init__.py")]
