"""What the scheduler checks before it takes a request: it refuses at once what can never be served."""

from __future__ import annotations

import numpy as np

from trellis.errors import CapacityError, InvalidRequestError
from trellis.runtime.messages import GenerateCommand
from trellis.runtime.scheduler.config import SchedulerConfig


def output_limit(command: GenerateCommand, config: SchedulerConfig, vocabulary_size: int) -> int:
    """How many tokens the request may produce: max_new_tokens, or what context and pool leave.

    Raises InvalidRequestError for a prompt that is empty, has ids outside the vocabulary or is to be taken back
    whole, CapacityError (status 400) for one that can never fit.
    """
    n = len(command.token_ids)
    if n == 0:
        raise InvalidRequestError("input_ids", "the prompt is empty; it needs at least one token")
    ids = np.asarray(command.token_ids, dtype=np.int64)
    if ids.min() < 0 or ids.max() >= vocabulary_size:
        wrong = int(ids[(ids < 0) | (ids >= vocabulary_size)][0])
        raise InvalidRequestError(
            "input_ids", f"token id {wrong} is outside the vocabulary of {vocabulary_size} ids"
        )
    if not all(0 < count < n for count in command.healing):
        raise InvalidRequestError(
            "healing", f"can take back 1 to {n - 1} of {n} prompt tokens, not {command.healing}"
        )
    if n >= config.context_length:
        raise CapacityError(
            f"the prompt has {n} tokens; the context length is {config.context_length}, "
            f"so a prompt may have at most {config.context_length - 1}",
            status=400,
        )
    if n + 1 > config.capacity:
        raise CapacityError(
            f"the prompt has {n} tokens and can never fit: the KV pool holds {config.capacity} "
            f"(max_total_tokens), so a prompt may have at most {config.capacity - 1}",
            status=400,
        )
    room = min(config.context_length, config.capacity) - n
    return max(0, min(command.params.max_new_tokens, room))
