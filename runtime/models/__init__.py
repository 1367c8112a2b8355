"""Model definitions, weights and tokenizers.

Names are loaded when first used: a process that only needs the tokenizer does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trellis.runtime.models.config import ModelConfig, load_config
from trellis.runtime.models.registry import resolve_model_path
from trellis.runtime.models.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from trellis.runtime.models.decoder import Decoder
    from trellis.runtime.models.loader import load_model

__all__ = [
    "Decoder",
    "ModelConfig",
    "Tokenizer",
    "load_config",
    "load_model",
    "load_tokenizer",
    "resolve_model_path",
]


def __getattr__(name: str) -> Any:
    if name == "load_model":
        from trellis.runtime.models.loader import load_model

        return load_model
    if name == "Decoder":
        from trellis.runtime.models.decoder import Decoder

        return Decoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
