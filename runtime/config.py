"""What a server can be told, once: the fields of ``ServerConfig`` are the flags of ``launch_server``."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from trellis.errors import InvalidRequestError
from trellis.fsm.registry import backend_names
from trellis.radix import POLICIES as EVICTION_POLICIES
from trellis.runtime.executor.contract import EXECUTORS, QUANTIZATIONS
from trellis.runtime.scheduler import POLICIES as SCHEDULE_POLICIES
from trellis.runtime.scheduler.policy import Policy, load_policy

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
KV_DTYPES = ("auto", "fp8_e4m3", "bfloat16", "float16", "float32")
SAMPLING_BACKENDS = ("trellis", "flashinfer")
MOST_THREADS = 1024  # many more, and nothing on the machine can start a thread
LOG_LEVELS = ("debug", "info", "warning", "error")


def _flag(default: Any, text: str, kind: type = str, choices: Sequence[str] | None = None) -> Any:
    return field(default=default, metadata={"help": text, "type": kind, "choices": choices})


def _first_lines(policies: Mapping[str, Policy]) -> str:
    """``name: what its docstring says first; …``"""
    lines = {name: (policy.order.__doc__ or "").partition("\n")[0] for name, policy in policies.items()}
    return "; ".join(f"{name}: {line[:1].lower()}{line[1:].rstrip('.')}" for name, line in lines.items())


@dataclass(frozen=True)
class ServerConfig:
    """Raises InvalidRequestError, naming the field, for values that make no sense. None stands for an automatic value."""

    model_path: str = field(
        metadata={
            "help": "a .gguf file, a Hugging Face directory with safetensors, or a known name: smollm2-135m",
            "type": str,
        }
    )
    host: str = _flag("127.0.0.1", "address to listen on; 0.0.0.0 opens the server to the network")
    port: int = _flag(30000, "port to listen on", int)
    chat_template: str | None = _flag(
        None,
        "a Jinja file, or the name of a chat template, such as chatml or llama-3 (default: the model's own)",
    )
    served_model_name: str | None = _flag(None, "model id in /v1 answers (default: the --model-path)")
    api_key: str | None = _flag(
        None,
        "clients must send it as 'Authorization: Bearer KEY' (default: $TRELLIS_API_KEY if set, else none)",
    )
    log_level: str = _flag("info", "how much to log", choices=LOG_LEVELS)
    dtype: str = _flag(
        "auto",
        "of weights and K/V; auto is bfloat16 where the processor or GPU computes in it, else float32, on a GPU float16",
        choices=DTYPES,
    )
    device: str = _flag(
        "auto",
        "where steps are computed; auto is cuda where there is a GPU that the installed torch can use, else cpu",
        choices=DEVICES,
    )
    kv_cache_dtype: str = _flag(
        "auto",
        "of keys and values in the pool; auto is --dtype, fp8_e4m3 needs a GPU of compute capability 8.9 or more",
        choices=KV_DTYPES,
    )
    num_threads: int | None = _flag(
        None, "threads of the model (default: the cores this process may use)", int
    )
    tp_size: int = _flag(
        1, "ranks (processes, each on a GPU of its own if there are GPUs) that share the model", int
    )
    tp_timeout: int = _flag(
        60, "seconds that a rank waits for the others within a step; then all of them are started again", int
    )
    executor: str = _flag(
        "auto",
        "how a step is computed: native in one call of C++ (CPU), torch op by op; auto is native where it can be had",
        choices=EXECUTORS,
    )
    quantization: str = _flag(
        "none",
        "how the native executor keeps weights: int8 or int4 made at load, or file, the blocks of a quantised GGUF file "
        "as they are; none keeps them in --dtype",
        choices=QUANTIZATIONS,
    )
    deterministic: bool = _flag(
        False,
        "the same bits for a request whatever runs beside it, is cached or is cut into chunks; native executor, slower",
        bool,
    )
    attention_backend: str = _flag(
        "auto",
        "how the torch executor computes attention: torch, or on a GPU flashinfer or triton; the native one has its own",
    )
    sampling_backend: str = _flag(
        "trellis",
        "what draws tokens on a GPU; flashinfer may be faster, but a request's seed does not give the same text again",
        choices=SAMPLING_BACKENDS,
    )
    context_length: int | None = _flag(
        None,
        "most tokens, prompt and output, of one request (default: the model's, if the pool holds it)",
        int,
    )
    allow_auto_truncate: bool = _flag(
        False, "cut a prompt that is too long at its beginning, with a warning, instead of refusing it", bool
    )
    max_total_tokens: int | None = _flag(
        None,
        "slots in the K/V pool (default: what a quarter of the free memory holds, at most four full contexts; on a GPU see "
        "--mem-fraction-static)",
        int,
    )
    mem_fraction_static: float = _flag(
        0.9,
        "share of a GPU's memory for weights, K/V pool and the largest step; the rest is for graphs and everything else",
        float,
    )
    disable_cuda_graph: bool = _flag(False, "launch every kernel of a decode step by itself", bool)
    cuda_graph_max_bs: int | None = _flag(
        None,
        "most requests of a decode step that is replayed as a graph (default: --max-running-requests, at most 256)",
        int,
    )
    page_size: int = _flag(1, "slots of a page: they are given out, cached and evicted together", int)
    eviction_policy: str = _flag(
        "lru", "what leaves the cache first when the pool is full", choices=tuple(EVICTION_POLICIES)
    )
    max_running_requests: int = _flag(128, "most requests in one batch", int)
    max_queued_requests: int = _flag(4096, "most requests that wait; more are answered with 503", int)
    chunked_prefill_size: int = _flag(
        1024,
        "most prompt tokens computed in one step; lower: steadier streams, higher: faster long prompts",
        int,
    )
    schedule_policy: str = _flag(
        "lpm",
        f"order of waiting requests; {_first_lines(SCHEDULE_POLICIES)}; or MODULE:ATTRIBUTE, a Policy of yours",
    )
    overlap: bool | None = _flag(
        None,
        "plan each step while the one before it is computed, which pays where the model does not run on the processor that "
        "plans (default: on a GPU)",
        bool,
    )
    grammar_backend: str = _flag(
        "auto",
        "engine for constraints; auto takes the best one for each kind",
        choices=tuple(backend_names()),
    )
    disable_jump_forward: bool = _flag(
        False, "sample every token of a constrained text, also where the constraint leaves no choice", bool
    )

    def __post_init__(self) -> None:
        self._check_types()
        if not 0 <= self.port <= 65535:
            raise InvalidRequestError("port", f"must be from 0 to 65535, not {self.port}")
        for name in (
            "num_threads",
            "context_length",
            "max_total_tokens",
            "page_size",
            "max_running_requests",
            "max_queued_requests",
            "chunked_prefill_size",
            "cuda_graph_max_bs",
            "tp_size",
            "tp_timeout",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(name, f"must be at least 1, not {value}")
        if self.num_threads is not None and self.num_threads > MOST_THREADS:
            raise InvalidRequestError(
                "num_threads", f"must be at most {MOST_THREADS}, not {self.num_threads}"
            )
        if not 0 < self.mem_fraction_static < 1:
            raise InvalidRequestError(
                "mem_fraction_static", f"must be more than 0 and less than 1, not {self.mem_fraction_static}"
            )
        for each in dataclasses.fields(self):
            known = each.metadata.get("choices")
            if known and getattr(self, each.name) not in known:
                raise InvalidRequestError(
                    each.name, f"must be one of {', '.join(known)}, not {getattr(self, each.name)!r}"
                )
        if self.tp_size > 1 and self.executor == "native":
            raise InvalidRequestError(
                "executor", f"native computes in one process, not on {self.tp_size} ranks; take auto or torch"
            )
        if self.tp_size > 1 and (self.quantization != "none" or self.deterministic):
            what = "deterministic" if self.deterministic else "quantization"
            raise InvalidRequestError(
                what,
                f"is for the native executor, which computes in one process, not on {self.tp_size} ranks",
            )
        if self.executor == "native" and self.attention_backend != "auto":
            raise InvalidRequestError(
                "attention_backend",
                f"{self.attention_backend} is for the torch executor, the native one has its own; take auto or executor torch",
            )
        if self.quantization != "none" and (self.executor == "torch" or self.attention_backend != "auto"):
            raise InvalidRequestError(
                "quantization",
                f"{self.quantization} is for the native executor, not for executor {self.executor} with attention "
                f"backend {self.attention_backend}",
            )
        if self.deterministic and (self.executor == "torch" or self.attention_backend != "auto"):
            raise InvalidRequestError(
                "deterministic",
                f"is for the native executor, not for executor {self.executor} with attention backend "
                f"{self.attention_backend}",
            )
        try:
            load_policy(self.schedule_policy)
        except InvalidRequestError as error:
            raise InvalidRequestError("schedule_policy", error.reason) from error
        if self.max_total_tokens and self.page_size > self.max_total_tokens:
            raise InvalidRequestError(
                "page_size",
                f"a page of {self.page_size} slots does not fit into a pool of {self.max_total_tokens}",
            )
        if self.context_length and self.max_total_tokens and self.context_length > self.max_total_tokens:
            raise InvalidRequestError(
                "context_length",
                f"{self.context_length} tokens do not fit into a pool of {self.max_total_tokens}, "
                "the most tokens in total",
            )

    def _check_types(self) -> None:
        for each in dataclasses.fields(self):
            value, kind = getattr(self, each.name), each.metadata["type"]
            if type(value) is not kind and not (value is None and each.default is None):
                raise InvalidRequestError(
                    each.name, f"must be of the type {kind.__name__}, not {type(value).__name__}"
                )

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model_path

    @property
    def max_requests(self) -> int:
        """Most sequences in flight."""
        return self.max_running_requests + self.max_queued_requests

    def public(self) -> dict[str, Any]:
        """All values but the secret ones, for clients."""
        values = dataclasses.asdict(self)
        values["api_key"] = None if self.api_key is None else "set"
        return values


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def on_command_line(error: Exception) -> str:
    """The message of an error, with the flag in place of the config's field."""
    if isinstance(error, InvalidRequestError) and error.field in ServerConfig.__dataclass_fields__:
        return f"{flag_of(error.field)}: {error.reason}"
    return str(error)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help shows all flags)\n")


def parse_args(argv: Sequence[str], prog: str = "trellis.launch_server") -> ServerConfig:
    """Flags → ServerConfig. Prints what is wrong to stderr and raises SystemExit(2), as argparse does."""
    parser = _Parser(
        prog=prog,
        description="Serve a model: /generate, /score and an OpenAI-compatible API under /v1.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for each in dataclasses.fields(ServerConfig):
        text, kind = each.metadata["help"], each.metadata["type"]
        required = each.default is dataclasses.MISSING
        if kind is bool and each.default is None:
            yes_or_no = argparse.BooleanOptionalAction
            parser.add_argument(flag_of(each.name), action=yes_or_no, default=argparse.SUPPRESS, help=text)
            continue
        if kind is bool:
            parser.add_argument(flag_of(each.name), action="store_true", help=text)
            continue
        parser.add_argument(
            flag_of(each.name),
            type=kind,
            required=required,
            default=argparse.SUPPRESS if required or each.default is None else each.default,
            choices=each.metadata.get("choices"),
            help=text,
        )
    values = vars(parser.parse_args(argv))
    values.setdefault("api_key", os.environ.get("TRELLIS_API_KEY") or None)
    try:
        return ServerConfig(**values)
    except InvalidRequestError as error:
        parser.error(on_command_line(error))
