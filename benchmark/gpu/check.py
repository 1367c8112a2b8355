"""The sections of the check, one after the other, within a budget of time."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmark.gpu import kernels, speed, texts
from benchmark.gpu.device_tests import run_device_tests
from benchmark.gpu.driving import Driver
from benchmark.gpu.models import llama_3_8b, medium, random_decoder, tiny
from benchmark.gpu.peaks import Peaks, measure_peaks
from benchmark.gpu.report import Report
from trellis.errors import ModelLoadError
from trellis.runtime.cuda.build import DeviceSettings, build_device_runner
from trellis.runtime.cuda.device import CudaDevice, Device
from trellis.runtime.cuda.runner import DeviceRunner
from trellis.runtime.executor.model_runner import ModelRunner
from trellis.runtime.models.decoder import Decoder

SECTIONS = ("kernels", "tests", "texts", "speed", "memory", "ablations")
BUDGET_S = 420.0  # after which no section begins; the last may take another minute
CHUNK = 2048
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Scale:
    """How much is done. small: for a run on a CPU, which shows that the check itself works."""

    small: bool
    batches: Sequence[int]
    context: int
    prefills: Sequence[int]
    rounds: int
    chunk: int
    running: int

    @staticmethod
    def of(small: bool) -> Scale:
        if small:
            return Scale(True, (1, 4), 24, (32,), 1, 64, 4)
        return Scale(False, (1, 8, 64, 256), 1024, (512, CHUNK), 3, CHUNK, 256)


class Check:
    """big: makes the model whose speed is measured. backends: of the attention, whose texts are compared."""

    def __init__(
        self,
        report: Report,
        device: Device,
        scale: Scale,
        big: Callable[[], Decoder],
        backends: Sequence[str] = kernels.BACKENDS,
    ) -> None:
        self.report, self.device, self.scale, self.backends = report, device, scale, backends
        self._big = big
        self._runner: DeviceRunner | None = None
        self._peaks: Peaks | None = None

    def run(self, sections: Sequence[str]) -> None:
        work: dict[str, Callable[[], None]] = {
            "kernels": self.kernels,
            "tests": lambda: run_device_tests(self.report, ROOT),
            "texts": self.texts,
            "speed": self.speed,
            "memory": self.memory,
            "ablations": self.ablations,
        }
        for name in sections:
            self.report.run(name, work[name])

    def kernels(self) -> None:
        dtypes = (torch.float32,) if self.scale.small else (torch.float32, torch.bfloat16, torch.float16)
        kernels.check_kernels(self.report, self.device.where, dtypes, self.scale.small)

    def texts(self) -> None:
        """With every backend that can be had here; in float32, but for flashinfer, which has no kernels for it."""
        config = tiny() if self.scale.small else medium()
        slots = 16384 if not self.scale.small else 2048
        for backend in self.backends:
            dtype = torch.bfloat16 if backend == "flashinfer" else torch.float32
            model, same = (random_decoder(config, dtype, self.device.where) for _ in range(2))
            reference = ModelRunner(same, slots, "torch", "torch")
            settings = DeviceSettings(
                backend, num_slots=slots, running=self.scale.running, graph_max=min(32, self.scale.running)
            )
            try:
                runner = build_device_runner(model, settings, self.device)
            except (ModelLoadError, ImportError) as error:
                self.report.skip("texts", f"attention {backend}", str(error))
                continue
            driver = Driver(runner, slots, self.scale.running, 512, config.context_length)
            texts.check_texts(self.report, driver, reference, self.scale.small, backend)
            self._graphs_were_used("texts", runner, backend)

    def _graphs_were_used(self, section: str, runner: DeviceRunner, backend: str) -> None:
        why = runner.step.attention.no_graphs
        if why is not None:
            self.report.skip(section, f"{backend}: decode steps are graphs", why)
            return
        stats = runner.stats()
        reasons = "; ".join(f"{count} steps: {reason}" for reason, count in stats["eager_steps"].items())
        self.report.right(section, f"{backend}: decode steps are graphs", stats["graph_steps"] > 0, reasons)

    @property
    def runner(self) -> DeviceRunner:
        """The big model, sized by the device's memory."""
        if self._runner is None:
            settings = DeviceSettings(
                mem_fraction=0.85,
                chunk=self.scale.chunk,
                running=self.scale.running,
                graph_max=self.scale.running,
            )
            self._runner = build_device_runner(self._big(), settings, self.device)
            self.report.about["attention"] = self._runner.step.attention.name
            self.report.about["operations"] = self._runner.step.model.ops.name
        return self._runner

    def driver(self) -> Driver:
        runner = self.runner
        return Driver(
            runner, runner.pool.slots, self.scale.running, self.scale.chunk, runner.config.context_length
        )

    def speed(self) -> None:
        report, runner, scale = self.report, self.runner, self.scale
        self._peaks = self._peaks or measure_peaks(self.device.where, runner.step.model.dtype, scale.small)
        report.figure("speed", "copy inside the device, read + written", self._peaks.copy / 1e12, "TB/s")
        report.figure("speed", "large product", self._peaks.products / 1e12, "TFLOP/s")
        speed.measure_decode(report, runner, self._peaks, scale.batches, scale.context)
        speed.measure_prefill(report, runner, self._peaks, scale.prefills)
        speed.measure_gaps(
            report, self.driver(), (2,) if scale.small else (1, 8, 64), 24 if scale.small else 128
        )
        self._graphs_were_used("speed", runner, runner.step.attention.name)

    def memory(self) -> None:
        speed.check_memory(self.report, self.runner, self.driver(), self.scale.chunk)

    def ablations(self) -> None:
        texts.measure_ablations(self.report, self.driver(), self.scale.rounds, self.scale.small)


def about(device: Device, notes: Sequence[str]) -> dict[str, Any]:
    versions: dict[str, str | None] = {}
    for name in ("torch", "triton", "flashinfer-python", "transformers", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    found: dict[str, Any] = {
        "device": device.name,
        "python": platform.python_version(),
        "versions": versions,
        "notes": list(notes),
    }
    if device.where.type == "cuda":
        found["cuda"] = torch.version.cuda
        found["capability"] = list(torch.cuda.get_device_capability(device.where))
        found["memory_gib"] = round(device.total_memory() / 2**30, 1)
    return found


def big_model(path: str | None, where: torch.device) -> Decoder:
    """The model at the path, in bfloat16; without one, random weights in the shape of Llama 3 8B."""
    if path is None:
        return random_decoder(llama_3_8b(), torch.bfloat16, where)
    from trellis.runtime.models.gguf_file import open_model
    from trellis.runtime.models.loader import load_model
    from trellis.runtime.models.registry import resolve_model_path

    return load_model(open_model(resolve_model_path(path)), torch.bfloat16, str(where))


def main(notes: Sequence[str], arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 if nothing was wrong (a missed bar is not wrong), 1 otherwise, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description="Check and measure the GPU executor on this machine's GPU.")
    parser.add_argument(
        "--model-path", help="a model for speed and memory (default: random weights, Llama 3 8B's shape)"
    )
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="the report as JSON")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds after which no section begins"
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    args = parser.parse_args(arguments)
    try:
        device = CudaDevice()
    except ModelLoadError as error:
        print(f"nothing was checked: {error}", file=sys.stderr)
        return 2
    report = Report(about(device, notes), args.budget)
    print(f"{report.about['device']}, {report.about['versions']}", *notes, sep="\n", flush=True)
    check = Check(report, device, Scale.of(False), lambda: big_model(args.model_path, device.where))
    check.run(args.sections)
    gc.collect()
    report.write(args.output)
    print(report.summary(), f"written to {args.output}", sep="\n")
    return int(report.failed)
