"""What the automatic values of the flags stand for on a GPU, without torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from trellis.errors import InvalidRequestError
from trellis.runtime.config import ServerConfig
from trellis.runtime.cuda.probe import Gpu, find_gpu, torch_cuda_version

BFLOAT16_SINCE = (8, 0)  # compute capability
FP8_SINCE = (8, 9)
MOST_IN_GRAPHS = 256  # requests; larger steps have so much to compute that launches are hidden behind it

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Machine:
    """What the choices depend on. torch_cuda: see ``torch_cuda_version``."""

    gpu: Gpu | None
    torch_cuda: str | None

    @staticmethod
    def here() -> Machine:
        return Machine(find_gpu(), torch_cuda_version())


def choose_device(config: ServerConfig, machine: Machine | None = None) -> ServerConfig:
    """``device`` is ``cpu`` or ``cuda`` afterwards; on cuda all that depends on it is settled too.

    Raises InvalidRequestError for what a CPU or this GPU cannot do. machine: another one than this.
    """
    if config.device == "cpu":
        return _on_cpu(config)
    machine = machine or Machine.here()
    gpu, reason = machine.gpu, _why_not(machine)
    if reason is None and gpu is not None:
        if config.device == "cuda" or not _wants_cpu(config):
            return _on_gpu(config, gpu)
        reason = "the executor, quantization or deterministic steps that were asked for are for a CPU"
    if config.device == "cuda":
        raise InvalidRequestError("device", f"cuda cannot be used: {reason}")
    if gpu is not None:
        logger.warning("steps are computed on the CPU, not on the %s: %s", gpu.name, reason)
    return _on_cpu(config)


def _why_not(machine: Machine) -> str | None:
    if machine.torch_cuda is None:
        return "the installed torch is a build without CUDA"
    return "the driver shows no GPU" if machine.gpu is None else None


def _wants_cpu(config: ServerConfig) -> bool:
    return (
        config.executor == "native"
        or config.quantization != "none"
        or config.deterministic
        or config.attention_backend == "native"
    )


def _on_cpu(config: ServerConfig) -> ServerConfig:
    if config.kv_cache_dtype == "fp8_e4m3":
        raise InvalidRequestError(
            "kv_cache_dtype", "fp8_e4m3 needs a GPU of compute capability 8.9 or more; take auto on a CPU"
        )
    if config.sampling_backend == "flashinfer":
        raise InvalidRequestError("sampling_backend", "flashinfer draws on a GPU; take trellis on a CPU")
    return replace(config, device="cpu", overlap=bool(config.overlap))


def _on_gpu(config: ServerConfig, gpu: Gpu) -> ServerConfig:
    _check_gpu(config, gpu)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if gpu.capability >= BFLOAT16_SINCE else "float16"
    return replace(
        config,
        device="cuda",
        dtype=dtype,
        executor="torch",
        overlap=config.tp_size == 1 and config.overlap is not False,
        cuda_graph_max_bs=config.cuda_graph_max_bs or min(config.max_running_requests, MOST_IN_GRAPHS),
    )


def _check_gpu(config: ServerConfig, gpu: Gpu) -> None:
    if config.executor == "native":
        raise InvalidRequestError("executor", "native is for a CPU; take auto or torch with device cuda")
    if config.quantization != "none":
        raise InvalidRequestError(
            "quantization", f"{config.quantization} is for a CPU; take none with device cuda"
        )
    if config.deterministic:
        raise InvalidRequestError(
            "deterministic", "steps are for the native executor of a CPU, not for device cuda"
        )
    if config.overlap and config.tp_size > 1:
        raise InvalidRequestError(
            "overlap",
            "is for one rank on a GPU: the others are told the tokens of a step when these are known",
        )
    if config.kv_cache_dtype == "fp8_e4m3" and gpu.capability < FP8_SINCE:
        major, minor = gpu.capability
        raise InvalidRequestError(
            "kv_cache_dtype",
            f"fp8_e4m3 needs a GPU of compute capability 8.9 or more, and the {gpu.name} has {major}.{minor}; take auto",
        )
