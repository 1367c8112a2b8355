"""The executor: the pool of keys and values, the model runner and the sampler.

Names are loaded when first used, so that the contract alone does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trellis.runtime.executor.kv_pool import KVPool
    from trellis.runtime.executor.model_runner import ModelRunner, build_runner
    from trellis.runtime.executor.sampler import sample

__all__ = ["KVPool", "ModelRunner", "build_runner", "sample"]

_HOMES = {
    "KVPool": "kv_pool",
    "ModelRunner": "model_runner",
    "build_runner": "model_runner",
    "sample": "sampler",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
