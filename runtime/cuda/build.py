"""From a model on a device to a runner: its kernels, its pool, its graphs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from trellis.errors import ModelLoadError
from trellis.runtime.attention.base import AttentionBackend, AttentionShape
from trellis.runtime.attention.flashinfer_sampling import FlashInferSampler
from trellis.runtime.attention.registry import create_attention
from trellis.runtime.cuda.device import CudaDevice, Device
from trellis.runtime.cuda.graphs import DecodeGraphs, graph_sizes
from trellis.runtime.cuda.memory import PoolPlan, largest_extends, largest_slots
from trellis.runtime.cuda.runner import DeviceRunner
from trellis.runtime.cuda.sampling import draw_later
from trellis.runtime.cuda.step import DeviceStep
from trellis.runtime.cuda.tokens import TokenTable
from trellis.runtime.cuda.waits import Waits
from trellis.runtime.cuda.warm_up import warm_up
from trellis.runtime.distributed.contract import Ranks
from trellis.runtime.executor.contract import SampleRow
from trellis.runtime.executor.kv_pool import FP8, KVPool, kv_bytes_per_token
from trellis.runtime.executor.model_runner import give_back_memory, resolve_dtype
from trellis.runtime.executor.step import EAGER_VALUES
from trellis.runtime.kernels.launch import why_not
from trellis.runtime.messages import SamplingParams
from trellis.runtime.models.decoder import Decoder
from trellis.runtime.models.gguf_file import GGUFFile, open_model
from trellis.runtime.models.loader import load_model
from trellis.runtime.models.ops import DecoderOps, TorchOps
from trellis.runtime.models.registry import resolve_model_path

KV_DTYPES = {
    "fp8_e4m3": FP8,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# At least so many tokens may be sampled in one step: one of each running request, and those of drafts.
TABLE_ROWS = 1 << 14
SCORED_ROWS = 512  # as in SchedulerConfig.max_score_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceSettings:
    """attention: a backend's name, or ``auto``. ops: what is between products, by ``triton``, ``torch``, or ``auto`` for triton
    where it can be had. kv_dtype: a name in ``KV_DTYPES``, or ``auto`` for the model's dtype.

    num_slots: of the pool; None for as many as fit into the share ``mem_fraction`` of the device's memory beside the weights and
    the largest step, which computes ``chunk`` tokens beside one of each of ``running`` requests. context_length: most tokens of
    one sequence, or None for the model's. graph_max: most requests of a decode step that is a graph; 0 for no graphs.
    sampling: ``trellis`` or ``flashinfer``, see ``FlashInferSampler``. page_size: slots of a page, in which the scheduler gives
    them out; flashinfer reads its pages whole, the other backends slot by slot.
    """

    attention: str = "auto"
    ops: str = "auto"
    kv_dtype: str = "auto"
    num_slots: int | None = None
    mem_fraction: float = 0.9
    chunk: int = 1024
    running: int = 128
    context_length: int | None = None
    graph_max: int = 128
    sampling: str = "trellis"
    page_size: int = 1


def load_device_runner(
    model_path: str | Path | GGUFFile, dtype: str, settings: DeviceSettings, ranks: Ranks | None = None
) -> DeviceRunner:
    """Load a model (a name, a path, or a file that is read already) onto the GPU, tensor by tensor.

    dtype: as in ``resolve_dtype``. Raises as ``build_device_runner`` does, and ModelLoadError for what cannot be loaded.
    """
    device = CudaDevice()
    named = model_path if isinstance(model_path, GGUFFile) else resolve_model_path(str(model_path))
    wanted = resolve_dtype(dtype, "cuda")
    model = load_model(open_model(named), wanted, str(device.where), ranks, settings.context_length)
    if ranks is not None:
        ranks.wait_for_all()
    give_back_memory()
    return build_device_runner(model, settings, device, ranks)


@torch.inference_mode()
def build_device_runner(
    model: Decoder,
    settings: DeviceSettings,
    device: Device | None = None,
    ranks: Ranks | None = None,
) -> DeviceRunner:
    """device: where the model is; None for the CUDA device. ranks: the group that computes the model together.

    Raises ModelLoadError for an attention backend or a type of K/V that cannot be had here, CapacityError when there is no room
    for a pool.
    """
    device = device or CudaDevice()
    dtype = kv_dtype(settings.kv_dtype, model.dtype)
    tokens = TokenTable(max(TABLE_ROWS, settings.chunk + settings.running), device.where)
    waits = Waits(device)
    sampler = FlashInferSampler() if settings.sampling == "flashinfer" else None
    with waits.named("start"):
        model.ops = _ops(settings.ops, device.where)
        plan, slots = None, settings.num_slots
        if slots is None:
            plan = _plan(model, settings, device, dtype, tokens)
            device.give_back()  # what the largest step had, in pieces that are too small for the pool
            slots = least(plan.slots, ranks, device)
        pool = KVPool(model.config, slots, dtype, str(device.where), settings.page_size)
        attention = _attention(model, pool, settings.attention)
        graphs = _graphs(model, attention, settings, device, tokens)
        step = DeviceStep(model, attention, device, tokens, graphs)
        if device.where.type == "cuda":
            warm_up(DeviceStep(model, attention, device, tokens), device, sampler)
        if graphs is not None:
            graphs.capture()
            if not least(len(graphs.captured), ranks, device) and graphs.captured:
                graphs.refuse("another rank could not capture them, and NCCL wants all or none to do so")
    logger.info("attention backend %s, operations by %s", attention.name, model.ops.name)
    return DeviceRunner(model.config, pool, step, device, tokens, waits, plan, sampler)


def _ops(name: str, where: torch.device) -> DecoderOps:
    reason = why_not(where)
    if name == "torch" or (name == "auto" and reason is not None):
        return TorchOps()
    if reason is not None:
        raise ModelLoadError(f"operations by {name!r} cannot be had: {reason}")
    from trellis.runtime.kernels.ops import TritonOps

    return TritonOps()


def kv_dtype(name: str, model: torch.dtype) -> torch.dtype:
    """Of the pool. ModelLoadError for an unknown name."""
    if name != "auto" and name not in KV_DTYPES:
        raise ModelLoadError(f"K/V dtype {name!r} is unknown; known: auto, {', '.join(KV_DTYPES)}")
    return model if name == "auto" else KV_DTYPES[name]


def check_kv(attention: str, model: torch.dtype, pool: torch.dtype) -> None:
    """ModelLoadError if the backend cannot read a pool of this type for a model of that one."""
    readable = {
        "triton": True,
        "flashinfer": pool == model or (pool == FP8 and model == torch.bfloat16),
    }
    if not readable.get(attention, pool == model):
        raise ModelLoadError(
            f"attention backend {attention!r} cannot read K/V of {pool} for a model of {model}; take K/V dtype 'auto', or "
            "attention backend 'triton'"
        )


def least(slots: int, ranks: Ranks | None, device: Device) -> int:
    """What every rank of a group has room for: they share out the same slots."""
    if ranks is None:
        return slots
    counts = torch.zeros(ranks.size, dtype=torch.int64, device=device.where)
    counts[ranks.rank] = slots
    return int(ranks.sum(counts).min())


def _attention(model: Decoder, pool: KVPool, name: str) -> AttentionBackend:
    attention = create_attention(name, AttentionShape.of(model.config), pool)
    check_kv(attention.name, model.dtype, pool.keys[0].dtype)
    return attention


def _graphs(
    model: Decoder, attention: AttentionBackend, settings: DeviceSettings, device: Device, tokens: TokenTable
) -> DecodeGraphs | None:
    if settings.graph_max < 1:
        return None
    context = settings.context_length or model.config.context_length
    return DecodeGraphs(
        model,
        attention,
        device,
        tokens,
        graph_sizes(settings.graph_max),
        settings.graph_max * context,
        context,
    )


def _plan(
    model: Decoder, settings: DeviceSettings, device: Device, dtype: torch.dtype, tokens: TokenTable
) -> PoolPlan:
    used = device.used_memory()  # without the small pool below, which is dropped
    page = settings.page_size
    slots = largest_slots(settings.chunk, settings.running, page)
    pool = KVPool(model.config, slots, dtype, str(device.where), page)
    rows = min(SCORED_ROWS + settings.running, EAGER_VALUES // model.config.vocab_size)
    extends = largest_extends(settings.chunk, settings.running, rows, page)

    def largest_step() -> None:
        step = DeviceStep(model, _attention(model, pool, settings.attention), device, tokens)
        logits = step.forward(extends)
        sampled = range(len(logits) - settings.running, len(logits))
        params = SamplingParams(temperature=1.0, top_p=0.9)
        rows = [SampleRow(row, params, seed=0, step=0) for row in sampled]
        draw_later(logits.take(sampled), rows, device)

    plan = PoolPlan(
        total=device.total_memory(),
        fraction=settings.mem_fraction,
        used=used,
        activations=device.peak_of(largest_step),
        token_bytes=kv_bytes_per_token(model.config, dtype),
        page_size=page,
    )
    plan.check(device.name)
    logger.info("%s: %s", device.name, plan.describe())
    return plan
