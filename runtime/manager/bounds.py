"""Bounds on what one call may make of a small body, checked before the work is done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from trellis.errors import InvalidRequestError
from trellis.runtime.messages import GenerateCommand

MAX_SCORED_BYTES = 16 << 20  # text that one call may have tokenized for its options
MAX_SENT_BYTES = 64 << 20  # what one call may send to the scheduler

T = TypeVar("T")


class Abandoned(Exception):
    """Whoever wanted the result has gone, so the work was given up."""


def never() -> bool:
    """For work that is not given up."""
    return False


async def in_thread(work: Callable[[Callable[[], bool]], T]) -> T:
    """Run ``work`` in a thread. Its argument says whether the caller was cancelled meanwhile: work asks it
    between its parts and then raises ``Abandoned``, so that nobody who leaves keeps a thread busy."""
    left = threading.Event()
    try:
        return await asyncio.to_thread(work, left.is_set)
    finally:
        left.set()


def check_sequences(count: int, limit: int, field: str) -> None:
    """Refuse what can never be in flight together. field: what the client called the prompts."""
    if count > limit:
        raise InvalidRequestError(
            field,
            f"{count} sequences (prompts, each times its n) in one request; this server takes at most "
            f"{limit} at once",
        )


def check_options(prompt: int, options: Sequence[str]) -> None:
    """Refuse options whose tokenizing would be out of all proportion. prompt: bytes of the prompt's text.

    Each option is tokenized together with the whole prompt (see ``PromptEncoder.joint``).
    """
    total = prompt * len(options) + sum(len(option.encode()) for option in options)
    if total > MAX_SCORED_BYTES:
        raise InvalidRequestError(
            "options",
            f"{len(options)} options, each after a prompt of {prompt} bytes, make {total} bytes of text; "
            f"one request may have {MAX_SCORED_BYTES}: score fewer options at once",
        )


def check_sent(commands: Sequence[GenerateCommand], field: str) -> None:
    """Refuse a message that repeats large prompts, constraints or biases in too many sequences."""
    total = sum(map(_sent_bytes, commands))
    if total > MAX_SENT_BYTES:
        raise InvalidRequestError(
            field,
            f"{len(commands)} sequences with their parameters make about {total} bytes; one request may "
            f"have {MAX_SENT_BYTES}: send fewer at once",
        )


def _sent_bytes(command: GenerateCommand) -> int:
    """About the size of a command on the wire."""
    params, constraint = command.params, command.constraint
    numbers = 4 * len(command.token_ids) + 5 * len(params.stop_token_ids) + 14 * len(params.logit_bias)
    texts = [
        *params.stop,
        *params.stop_regex,
        command.namespace,
        command.rid,
        "" if constraint is None else constraint.source,
    ]
    return 256 + numbers + sum(map(len, texts))
