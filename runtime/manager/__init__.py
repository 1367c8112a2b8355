"""Everything between the outside world and the scheduler: validation, tokenizing, text of the output."""

from trellis.runtime.manager.detokenizer import Detokenizer
from trellis.runtime.manager.tokenizer_manager import TokenizerManager
from trellis.runtime.manager.types import GenerateInput, GenerateResult, OptionScore, ScoreOutput
from trellis.runtime.manager.validation import sample_seed

__all__ = [
    "Detokenizer",
    "GenerateInput",
    "GenerateResult",
    "OptionScore",
    "ScoreOutput",
    "TokenizerManager",
    "sample_seed",
]
