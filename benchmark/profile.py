"""Where the time of a step goes on this machine's CPU, and how near it is to what the machine can do.

``python -m benchmark.profile [--model-path PATH] [--dtype bfloat16] [--quantization int8] [--num-threads N] [--rounds N] [--torch]``

For decodes of 1, 8 and 32 requests and for a prefill of 512 tokens: the time of each part of the native step, of the Python
around it, and of greedy sampling; then the same steps as a server takes them (``benchmark/whole_step.py``), with scheduling,
masks, and the ways between its processes; and the share of the floor, which is the larger of bytes ÷ measured bandwidth and
products ÷ measured rate. Bandwidth and rate are measured between the steps. With ``--torch`` the torch executor computes the
same batches in alternation. Other work on the machine makes everything longer: the best of all rounds is what is
compared, and medians stand beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from benchmark.whole_step import print_whole_steps
from trellis.runtime.executor import ModelRunner, build_runner
from trellis.runtime.executor.batch import flatten
from trellis.runtime.executor.contract import QUANTIZATIONS, Extend, SampleRow
from trellis.runtime.executor.step import NativeStep
from trellis.runtime.messages import SamplingParams
from trellis.runtime.models import ModelConfig, load_tokenizer, resolve_model_path
from trellis.runtime.native.abi import PARTS

SLOTS = 16384
STREAM_BYTES = 256 << 20
SQUARE = 1024
REST = 0.1  # seconds; torch's threads go on spinning for a while after its last operation, on the cores of the next step

GEMM = ("qkv", "output", "gate_up", "down", "head")


@dataclass(frozen=True)
class Workload:
    """extends: (new tokens, tokens before them) of each."""

    name: str
    extends: tuple[tuple[int, int], ...]


WORKLOADS = (
    Workload("decode, 1 request", ((1, 200),)),
    Workload("decode, 8 requests", ((1, 200),) * 8),
    Workload("decode, 32 requests", ((1, 200),) * 32),
    Workload("prefill of 512", ((512, 0),)),
    Workload("prefill of 1,024 after 1,024", ((1024, 1024),)),
)


@dataclass
class Measured:
    """Seconds, one a round. parts: the parts of the round whose step was the shortest."""

    native: list[float] = field(default_factory=list)
    python: list[float] = field(default_factory=list)
    sampling: list[float] = field(default_factory=list)
    torch: list[float] = field(default_factory=list)
    parts: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(PARTS)))


@dataclass
class Rates:
    """The best seen so far: bytes a second read by all threads, and multiply-adds a second in the model's dtype."""

    bandwidth: float = 0.0
    products: float = 0.0

    def measure(self, stream: torch.Tensor, square: torch.Tensor) -> None:
        self.bandwidth = max(self.bandwidth, STREAM_BYTES / seconds(stream.sum))
        self.products = max(self.products, SQUARE**3 / seconds(lambda: square @ square))


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def batch_of(workload: Workload, vocab: int) -> list[Extend]:
    rng = np.random.default_rng(0)
    extends, slot = [], 1
    for n, start in workload.extends:
        slots = np.arange(slot, slot + start + n, dtype=np.int32)
        extends.append(Extend(rng.integers(100, vocab, n).astype(np.int32), start, slots, n - 1))
        slot += start + n
    return extends


def once(runner: ModelRunner, batch: list[Extend], measured: Measured) -> None:
    """One step, part by part, and the greedy choice of its tokens."""
    step = runner.step
    if not isinstance(step, NativeStep):
        raise SystemExit("the native executor cannot be used here; see the warning above")
    parts = np.zeros(len(PARTS))
    logits = torch.empty((len(batch), runner.vocab_size))
    flat = flatten(batch)
    took = seconds(lambda: step.decoder.step(flat, step.pointers, logits=logits, seconds=parts))
    if not measured.native or took < min(measured.native):
        measured.parts = parts
    measured.native.append(took)
    whole = seconds(lambda: runner.forward(batch[:1])) - seconds(
        lambda: step.decoder.step(flatten(batch[:1]), step.pointers, logits=logits[:1])
    )
    measured.python.append(max(whole, 0.0) + seconds(lambda: flatten(batch)))
    rows = runner.forward(batch)
    asked = [SampleRow(i, SamplingParams(temperature=0.0), seed=0, step=0) for i in range(len(batch))]
    measured.sampling.append(seconds(lambda: runner.sample(rows, asked)))


def floor(
    config: ModelConfig, workload: Workload, weights: int, itemsize: int, rates: Rates
) -> tuple[float, float]:
    """Seconds that reading weights (so many bytes), keys and values takes at least, and that the products take.

    An embedding that is not the head too is among the weights, though only rows of it are read.
    """
    c = config
    layer = c.hidden_size * (2 * c.query_size + 2 * c.kv_size + 3 * c.intermediate_size)
    head = c.vocab_size * c.hidden_size
    rows = sum(n for n, _ in workload.extends)
    keys = sum(n + start for n, start in workload.extends)
    pairs = sum(n * start + n * (n + 1) // 2 for n, start in workload.extends)
    read = weights + 2 * c.num_layers * c.kv_size * keys * itemsize
    products = (
        rows * c.num_layers * layer + len(workload.extends) * head + 2 * pairs * c.num_layers * c.query_size
    )
    return read / rates.bandwidth, products / rates.products


def show(runner: ModelRunner, workload: Workload, measured: Measured, rates: Rates) -> None:
    best = min(measured.native)
    if not isinstance(runner.step, NativeStep):
        raise TypeError("only native steps are measured")
    itemsize = runner.pool.keys[0].dtype.itemsize
    reading, computing = floor(runner.config, workload, runner.step.decoder.nbytes, itemsize, rates)
    print(
        f"\n{workload.name}: best {best * 1e3:.2f} ms, median {statistics.median(measured.native) * 1e3:.2f} ms"
    )
    parts = dict(zip(PARTS, measured.parts.tolist(), strict=True))
    parts["products"] = sum(parts.pop(name) for name in GEMM)
    for name, value in sorted(parts.items(), key=lambda item: -item[1]):
        print(f"  {name:<12} {value * 1e3:8.2f} ms {value / measured.parts.sum():7.1%}")
    around = (("python", measured.python), ("sampling", measured.sampling))
    for name, values in around:
        print(f"  {name:<12} {min(values) * 1e3:8.2f} ms   beside the step")
    bound = "reading" if reading > computing else "products"
    print(
        f"  floor: reading {reading * 1e3:.2f} ms, products {computing * 1e3:.2f} ms; "
        f"the step reaches {max(reading, computing) / best:.0%} of it ({bound})"
    )
    if measured.torch:
        ratios = sorted(t / n for t, n in zip(measured.torch, measured.native, strict=False))
        print(
            f"  torch executor: best {min(measured.torch) * 1e3:.2f} ms; torch ÷ native {min(measured.torch) / best:.2f} "
            f"(best ÷ best), {statistics.median(ratios):.2f} (median of pairs)"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model-path", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none")
    parser.add_argument("--num-threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--torch", action="store_true", help="compare with the torch executor")
    args = parser.parse_args(argv)
    build: Callable[[str], ModelRunner] = lambda executor: build_runner(  # noqa: E731
        args.model_path,
        args.dtype,
        num_slots=SLOTS,
        num_threads=args.num_threads,
        executor=executor,
        quantization=args.quantization if executor == "native" else "none",
    )
    runner = build("native")
    other = build("torch") if args.torch else None
    dtype = runner.pool.keys[0].dtype
    stream = torch.ones(STREAM_BYTES // 4)
    square = torch.randn(SQUARE, SQUARE).to(dtype)
    rates, results = Rates(), {workload: Measured() for workload in WORKLOADS}
    for _ in range(args.rounds):
        rates.measure(stream, square)
        time.sleep(REST)
        for workload, measured in results.items():
            batch = batch_of(workload, runner.vocab_size)
            once(runner, batch, measured)
            if other is not None:
                measured.torch.append(seconds(lambda batch=batch: other.forward(batch)))  # type: ignore[misc]
    print(
        f"{dtype}, {torch.get_num_threads()} threads: {rates.bandwidth / 1e9:.1f} GB/s read, "
        f"{rates.products / 1e9:.0f} billion multiply-adds a second"
    )
    for workload, measured in results.items():
        show(runner, workload, measured, rates)
    tokenizer = load_tokenizer(resolve_model_path(args.model_path))
    print_whole_steps(runner, tokenizer, SLOTS, args.rounds)


if __name__ == "__main__":
    main()
