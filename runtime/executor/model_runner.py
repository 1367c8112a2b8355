"""The model as the scheduler drives it: extends in, sampled tokens out."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trellis.errors import ModelLoadError
from trellis.runtime.distributed.contract import Ranks
from trellis.runtime.executor.contract import Extend, Logits, Sampled, SampleRow
from trellis.runtime.executor.kv_pool import KVPool
from trellis.runtime.executor.sampler import is_plain, sample, token_logprobs
from trellis.runtime.executor.step import LogitsRows, Step, make_step
from trellis.runtime.messages import TopLogprobs
from trellis.runtime.models.config import ModelConfig
from trellis.runtime.models.decoder import Decoder
from trellis.runtime.models.gguf_file import GGUFFile, open_model
from trellis.runtime.models.loader import load_model
from trellis.runtime.models.registry import resolve_model_path
from trellis.runtime.native.decoder import AS_GIVEN
from trellis.runtime.native.quantized import Quantization, read_quantization

SCORE_ROWS = 64


class StepRunner:
    """Implements ``trellis.runtime.executor.contract.Runner`` over a step. One caller at a time: the pool and the plan of a step
    belong to the forward in progress."""

    def __init__(self, config: ModelConfig, pool: KVPool, step: Step) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.pool = pool
        self.step = step
        self.followed: Tensor | None = None
        """int64 [places]: where on the device the tokens stand that ``Extend.follows`` names, if the runner keeps any."""

    def release(self) -> None:
        """Free what a group cannot be left with. No step is computed afterwards."""

    @torch.inference_mode()
    def forward(self, extends: Sequence[Extend]) -> LogitsRows:
        """Compute all extends as one ragged batch; their K/V is in the pool afterwards."""
        return self.step.forward(extends)

    @torch.inference_mode()
    def sample(self, logits: Logits, rows: Sequence[SampleRow]) -> Sampled:
        """One token a row (see ``runtime/executor/sampler.py``)."""
        own = own_logits(logits)
        if all(map(is_plain, rows)):
            best = own.best(rows)
            if best is not None:
                nothing: list[None] = [None] * len(rows)
                return Sampled(best, list(nothing), list(nothing))
        return sample(own.take([row.row for row in rows]), rows) if rows else Sampled([], [], [])

    @torch.inference_mode()
    def score(
        self, logits: Logits, rows: Sequence[int], token_ids: Sequence[int], top_logprobs_num: int
    ) -> tuple[list[float], list[TopLogprobs]]:
        """log-softmax of ``token_ids[i]`` at ``rows[i]``, and the best alternatives there."""
        values: list[float] = []
        top: list[TopLogprobs] = []
        for at in range(0, len(rows), SCORE_ROWS):
            part = slice(at, at + SCORE_ROWS)
            some = token_logprobs(own_logits(logits).take(rows[part]), token_ids[part], top_logprobs_num)
            values += some[0]
            top += some[1]
        return values, top


class ModelRunner(StepRunner):
    """A model with a pool of its own.

    attention, executor, deterministic: see ``make_step``. num_threads: of the native step; None takes as many as torch.
    page_size: slots of a page, in which they will be given out (see ``KVPool``).
    """

    def __init__(
        self,
        model: Decoder,
        num_slots: int,
        attention: str = "auto",
        executor: str = "auto",
        num_threads: int | None = None,
        quantization: Quantization = AS_GIVEN,
        deterministic: bool = False,
        page_size: int = 1,
    ) -> None:
        pool = KVPool(model.config, num_slots, model.dtype, str(model.device), page_size)
        threads = num_threads or torch.get_num_threads()
        step = make_step(model, pool, executor, attention, threads, quantization, deterministic)
        super().__init__(model.config, pool, step)


def own_logits(logits: Logits) -> LogitsRows:
    if not isinstance(logits, LogitsRows):
        raise TypeError(f"these logits are a {type(logits).__name__}; a runner reads only its own")
    return logits


def build_runner(
    model_path: str | Path | GGUFFile,
    dtype: str = "auto",
    attention: str = "auto",
    num_slots: int = 16384,
    *,
    num_threads: int | None = None,
    executor: str = "auto",
    quantization: str = "none",
    deterministic: bool = False,
    ranks: Ranks | None = None,
    context_length: int | None = None,
    page_size: int = 1,
) -> ModelRunner:
    """Load a model (a name, a path, or a file that is read already) on the CPU and give it a pool of ``num_slots`` token slots.
    (``runtime/cuda/build.py`` does so on a GPU.)

    dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``. num_threads: threads of torch and of the native step; None
    leaves torch's own choice. attention, executor, deterministic: see ``make_step``. quantization: how the native step keeps weights,
    ``none``, ``int8``, ``int4`` or ``file``: see ``runtime/native/quantized.py``. ranks: the group that computes the model together,
    of which this process loads its own part. context_length: see ``load_model``. page_size: see ``ModelRunner``.
    Raises ModelLoadError, and CapacityError when the pool does not fit.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    named = model_path if isinstance(model_path, GGUFFile) else resolve_model_path(str(model_path))
    source = open_model(named)
    model = load_model(source, resolve_dtype(dtype, "cpu"), "cpu", ranks, context_length)
    if ranks is not None:
        ranks.wait_for_all()
    kept = read_quantization(quantization, source, model.config)
    runner = ModelRunner(model, num_slots, attention, executor, num_threads, kept, deterministic, page_size)
    del model, kept
    give_back_memory()
    return runner


def give_back_memory() -> None:
    """Hand what loading took and freed back to the system, where the C library (glibc) can: it would keep some 200 MB."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """``auto`` is bfloat16 where the device multiplies it natively (twice as fast as float32 then), else float32."""
    if name == "auto":
        native = has_native_bfloat16() if device == "cpu" else True
        return torch.bfloat16 if native else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ModelLoadError(f"dtype {name!r} is unknown; known: auto, {', '.join(sorted(known))}")
    return known[name]


def has_native_bfloat16() -> bool:
    """Whether this CPU has bfloat16 products (AVX-512 BF16, AMX, or Arm's bf16), by the kernel's list of features."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return False
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(features)
