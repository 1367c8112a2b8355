"""From a ``ServerConfig`` to a scheduler with a loaded model."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trellis.errors import InvalidRequestError
from trellis.runtime.config import ServerConfig
from trellis.runtime.cuda.choices import choose_device
from trellis.runtime.distributed.contract import Place, Ranks
from trellis.runtime.distributed.split import local_kv_size
from trellis.runtime.loop import SteppedScheduler
from trellis.runtime.models import ModelConfig, Tokenizer, load_config, load_tokenizer, resolve_model_path
from trellis.runtime.models.gguf_file import GGUFFile, open_model

if TYPE_CHECKING:
    from trellis.runtime.executor.model_runner import StepRunner

MEMORY_SHARE = 4  # a quarter of the free memory is for the pool
FULL_CONTEXTS = 4  # more than so many longest requests need no larger pool by default
# Shapes of products. Decoding needs five for each number of running requests, and two a length.
KERNELS_KEPT = 128
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

logger = logging.getLogger(__name__)


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Assembly:
    """What a loop needs. config: without automatic values. close: frees what scheduler and grammars hold. stay_in_touch: to be
    called now and then while there is nothing to do."""

    config: ServerConfig
    tokenizer: Tokenizer
    scheduler: SteppedScheduler
    close: Callable[[], None]
    stay_in_touch: Callable[[], None] = _nothing


def assemble(config: ServerConfig, wake: Callable[[], None]) -> Assembly:
    """Load everything. wake is called whenever a grammar is ready, so that the loop looks at it.

    Raises ModelLoadError; InvalidRequestError for a config that does not fit the model.
    """
    model = open_model(resolve_model_path(config.model_path))
    if config.tp_size > 1:
        raise InvalidRequestError("tp_size", "more than one rank needs a server: trellis serve --tp-size N")
    config = settle(config, load_config(model))
    return assemble_settled(config, model, load_tokenizer(model, config.chat_template), wake)


def assemble_settled(
    config: ServerConfig,
    model: Path | GGUFFile,
    tokenizer: Tokenizer,
    wake: Callable[[], None],
    place: Place | None = None,
) -> Assembly:
    """As ``assemble``, for a config that ``settle`` returned, and its model as ``open_model`` has it.

    place: that of rank 0 in its group, where there is one; waits for the other ranks then.
    """
    set_up_threads()
    # Here, so that the HTTP process, which only settles the config, loads neither torch nor the grammars.
    from trellis.fsm import GrammarCompiler
    from trellis.runtime.scheduler import Scheduler, SchedulerConfig

    if config.context_length is None or config.num_threads is None:
        raise ValueError("the config has automatic values left; settle() fills them in")
    runner, stay_in_touch, leave = _lead(config, model, place)
    slots = config.max_total_tokens or runner.pool.slots
    config = replace(config, max_total_tokens=slots, context_length=min(config.context_length, slots))
    grammars = GrammarCompiler(tokenizer.vocabulary(), backend=config.grammar_backend)
    scheduler = Scheduler(
        SchedulerConfig(
            max_total_tokens=slots,
            context_length=settled_context_length(config),
            max_running_requests=config.max_running_requests,
            max_queued_requests=config.max_queued_requests,
            chunked_prefill_size=config.chunked_prefill_size,
            policy=config.schedule_policy,
            page_size=config.page_size,
            eviction_policy=config.eviction_policy,
            overlap=bool(config.overlap),
        ),
        runner,
        tokenizer.vocabulary(),
        grammars,
        on_grammar_ready=wake,
    )

    def close() -> None:
        grammars.close()
        leave()

    return Assembly(config, tokenizer, scheduler, close, stay_in_touch)


def load_runner(config: ServerConfig, model: Path | GGUFFile, ranks: Ranks | None = None) -> StepRunner:
    """The model and its pool; of a group's ranks, the part of this one."""
    if config.device == "cuda":
        return _load_on_gpu(config, model, ranks)
    if config.max_total_tokens is None:
        raise ValueError("the config has automatic values left; settle() fills them in")
    from trellis.runtime.executor import build_runner

    return build_runner(
        model,
        config.dtype,
        config.attention_backend,
        config.max_total_tokens,
        num_threads=config.num_threads,
        executor=config.executor,
        quantization=config.quantization,
        deterministic=config.deterministic,
        ranks=ranks,
        context_length=config.context_length,
        page_size=config.page_size,
    )


def _load_on_gpu(config: ServerConfig, model: Path | GGUFFile, ranks: Ranks | None) -> StepRunner:
    from trellis.runtime.cuda.build import DeviceSettings, load_device_runner

    settings = DeviceSettings(
        attention=config.attention_backend,
        kv_dtype=config.kv_cache_dtype,
        num_slots=config.max_total_tokens,
        mem_fraction=config.mem_fraction_static,
        chunk=config.chunked_prefill_size,
        running=config.max_running_requests,
        context_length=config.context_length,
        graph_max=0 if config.disable_cuda_graph else config.cuda_graph_max_bs or 0,
        sampling=config.sampling_backend,
        page_size=config.page_size,
    )
    return load_device_runner(model, config.dtype, settings, ranks)


def _lead(
    config: ServerConfig, model: Path | GGUFFile, place: Place | None
) -> tuple[StepRunner, Callable[[], None], Callable[[], None]]:
    """The runner, what is to be done while it is idle, and how it is closed."""
    if place is None:
        return load_runner(config, model), _nothing, _nothing
    from trellis.runtime.distributed.join import lead_group

    lead = lead_group(place, config.device, functools.partial(load_runner, config, model))
    return lead.runner, lead.stay_in_touch, lead.close


def set_up_threads() -> None:
    """What torch's libraries read when they are loaded: call it before that."""
    _let_threads_sleep()
    _bound_kernel_caches()


def _let_threads_sleep() -> None:
    """Threads of a product that wait for each other spin for microseconds, then sleep.

    By default they spin for milliseconds, and take the core from just the one they wait for as soon as anything else
    runs on the machine: measured on two busy cores, steps took up to ten times as long. Never to spin at all
    (OMP_WAIT_POLICY=passive) costs a tenth on a quiet machine; this costs nothing there. OpenMP reads it when torch
    is loaded; what the user has set stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _bound_kernel_caches() -> None:
    """Products in bfloat16 compile a kernel for every shape that they meet, and keep it.

    Twice: oneDNN in its cache of primitives, and ideep, the layer between it and torch, in another, each up to 1,024
    of them and each about 300 kB a shape, whatever its size (measured with torch 2.13 on AVX-512). Under load of mixed
    lengths (``benchmark.soak``) a process grew by about 400 MB in its first minute. Float32 goes another way and keeps
    next to nothing. Both caches read these when they are first used; what the user has set stays.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS_KEPT))
    os.environ.setdefault("LRU_CACHE_CAPACITY", str(KERNELS_KEPT))


def settle(config: ServerConfig, model: ModelConfig) -> ServerConfig:
    """Put numbers in place of automatic values; but on a GPU the pool is sized when the model is loaded there.

    Raises InvalidRequestError when a context length was asked for that the model does not have, or something that the
    device cannot do; ModelLoadError for a model that cannot be split among so many ranks.
    """
    config = choose_device(config)
    kv_size = model.kv_size if config.tp_size == 1 else local_kv_size(model, config.tp_size)
    dtype = _dtype() if config.dtype == "auto" else config.dtype
    if config.device == "cpu" and config.kv_cache_dtype not in ("auto", dtype):
        raise InvalidRequestError(
            "kv_cache_dtype", f"is the dtype of the model on a CPU, {dtype}, not {config.kv_cache_dtype}"
        )
    wanted = config.context_length or model.context_length
    if wanted > model.context_length:
        raise InvalidRequestError(
            "context_length",
            f"the model's context is {model.context_length} tokens, so it cannot be {wanted}",
        )
    tokens = config.max_total_tokens
    if tokens is None and config.device != "cuda":
        size = 2 * model.num_layers * kv_size * BYTES[dtype] * config.tp_size
        affordable = free_memory() // MEMORY_SHARE // size
        tokens = max(min(affordable, FULL_CONTEXTS * wanted), config.context_length or 256)
    if tokens is not None:
        tokens -= tokens % config.page_size
    if tokens is not None and tokens < wanted:
        logger.warning("the pool of %d tokens limits the context length, which could be %d", tokens, wanted)
    return replace(
        config,
        dtype=dtype,
        executor="torch" if config.tp_size > 1 else config.executor,  # the native step is one process
        num_threads=config.num_threads or max(1, len(os.sched_getaffinity(0)) // config.tp_size),
        max_total_tokens=tokens,
        context_length=min(wanted, tokens or wanted),
    )


def settled_context_length(config: ServerConfig) -> int:
    """Of a config that ``settle`` returned; ValueError for another."""
    if config.context_length is None:
        raise ValueError("the config has automatic values left; settle() fills them in")
    return config.context_length


def free_memory() -> int:
    """Bytes that this process may still take: of the machine, and of its control group where that says less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.strip().isdigit() and used.strip().isdigit():
        free = min(free, max(int(limit) - int(used), 0))
    return free


def _dtype() -> str:
    """bfloat16 where the processor multiplies it natively; elsewhere it is emulated, slower than float32.

    Decided here, not by the runner, since the size of the pool depends on it, and without torch, which the
    HTTP process does not load.
    """
    lines = _read("/proc/cpuinfo").splitlines()
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    return "float32" if {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(features) else "bfloat16"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
